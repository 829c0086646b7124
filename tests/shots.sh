#!/usr/bin/env bash
# Pictures of pages, wide and on a phone, light and dark, in runs/shots, for whoever changes a template. Needs Chromium.
# Pages are served from this folder, because the site's search does not work from files. Ends with status 1 and the messages if a
# page writes to the console.
#
#     tests/shots.sh runs/site/index.html runs/mine/mismatch/report.html
set -euo pipefail
out=runs/shots
mkdir -p "$out"
console=$out/console.log
: > "$console"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
port=${PORT:-8931}
python3 -m http.server "$port" --bind 127.0.0.1 > /dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
sleep 1
for page in "$@"; do
    for width in 1280 400; do
        # A window is never narrower than 500 pixels; a frame in it may be.
        address=http://127.0.0.1:$port/$(realpath --relative-to=. "$page")
        echo "<link rel=icon href=data:,><body style='margin: 0'><iframe src='$address' width=$width height=2400 style='border: 0'>" > "$out/framed.html"
        for scheme in dark light; do
            picture=$out/$(basename "$(dirname "$page")")_${width}_$scheme.png
            "$chromium" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$(realpath "$out")/$scheme" \
                --window-size="$width,2400" --blink-settings=preferredColorScheme="$([ $scheme = light ] && echo 1 || echo 0)" \
                --virtual-time-budget=8000 --enable-logging=stderr --screenshot="$picture" \
                "http://127.0.0.1:$port/$out/framed.html" 2>&1 | grep CONSOLE >> "$console" || true
            echo "$picture"
        done
    done
done
if [ -s "$console" ]; then
    cat "$console"
    exit 1
fi
