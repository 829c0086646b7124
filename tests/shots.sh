#!/usr/bin/env bash
# Pictures of pages, wide and on a phone, light and dark, in runs/shots, for whoever changes a template. Needs Chromium.
#
#     tests/shots.sh runs/site/index.html runs/mine/mismatch/report.html
set -euo pipefail
out=runs/shots
mkdir -p "$out"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
for page in "$@"; do
    for width in 1280 400; do
        # A window is never narrower than 500 pixels; a frame in it may be.
        echo "<body style='margin: 0'><iframe src='file://$(realpath "$page")' width=$width height=2400 style='border: 0'>" > "$out/framed.html"
        for scheme in dark light; do
            picture=$out/$(basename "$(dirname "$page")")_${width}_$scheme.png
            "$chromium" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$(realpath "$out")/$scheme" \
                --window-size="$width,2400" --blink-settings=preferredColorScheme="$([ $scheme = light ] && echo 1 || echo 0)" \
                --virtual-time-budget=8000 --screenshot="$picture" "file://$(realpath "$out")/framed.html" 2> /dev/null
            echo "$picture"
        done
    done
done
