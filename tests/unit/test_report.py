"""The report: one file, no network, the numbers of the stream, and a sentence that follows from them."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest

from mismatch_ext.alarms import STALE_ABS_DIFF
from mismatch_ext.checks import Checks
from mismatch_ext.errors import PeerVersionError, RunDirectoryError
from mismatch_ext.log_reading import RunData, read_run
from mismatch_ext.report import build, judge_all, level_of, load_runs, summarize, verdict
from mismatch_ext.report import page as report_page
from mismatch_ext.report.figures import Figure, sections
from mismatch_ext.report.findings import side_dtype
from mismatch_ext.report.levels import HEALTHY_ABS_DIFF, SAME_ABS_DIFF
from mismatch_ext.report.summary import pool_profile
from tests.unit.synthetic_runs import header, run_stream, write_arms, write_run

LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """What a browser would see: tags, loading attributes, table cells, plot data, text outside scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.cells: dict[tuple[str, str, str], str | None] = {}
        self.plots: dict[str, Any] = {}
        self.csp = ""
        self.text = ""
        self._inside = ""
        self._plot: str | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attributes if name in LOADING]
        self._inside = tag if tag in ("script", "style") else ""
        self._plot = given.get("data-plot") if tag == "script" else None
        if given.get("http-equiv") == "Content-Security-Policy":
            self.csp = given["content"] or ""
        if "data-metric" in given:
            key = (given["data-run"] or "", given["data-split"] or "", given["data-metric"] or "")
            self.cells[key] = given.get("title")

    def handle_endtag(self, tag: str) -> None:
        self._inside, self._plot = "", None

    def handle_data(self, data: str) -> None:
        if self._plot:
            self.plots[self._plot] = json.loads(data)
        if not self._inside:
            self.text += " " + " ".join(data.split())


def rendered(run_dir: Path) -> Page:
    """Render with a stand-in for the five megabytes of plotly.js."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "plotly_js", lambda: "/* plotly.js v0 */")
        return Page(build(run_dir).path)


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arms(tmp_path_factory.mktemp("arms"))


@pytest.fixture(scope="module")
def page(arms: Path) -> Page:
    return Page(build(arms, arms / "page.html").path)


def flat_run(
    run_dir: Path,
    mean: float,
    *,
    k3: float | None = None,
    name: str = "a",
    eval_mean: float | None = None,
    **head: Any,
) -> Path:
    """Write a run of three equal steps with the given gap."""
    with run_stream(run_dir, header=header(name, **head)) as stream:
        for step in range(3):
            gap = {"logp_abs_diff_mean": mean, "logp_abs_diff_max": 3 * mean, "tokens": 10.0}
            gap["k3_kl"] = 0.8 * mean**2 if k3 is None else k3
            stream.step(step, {f"mismatch/{key}": value for key, value in gap.items()} | {"reward": 0.5})
        if eval_mean is not None:
            stream.step(2, {"mismatch/logp_abs_diff_mean": eval_mean}, "eval/long")
    return run_dir


def figures_of(runs: dict[str, RunData], section: str) -> tuple[Figure, ...]:
    return next((one.figures for one in sections(runs) if one.id == section), ())


def say(run_dir: Path) -> str:
    runs = load_runs(run_dir)
    return verdict(judge_all(runs, summarize(runs)), runs)


def test_the_file_loads_nothing_and_inlines_plotly_once(page: Page) -> None:
    assert page.tags["link"] == page.tags["iframe"] == page.tags["img"] == 0
    assert all(link.startswith("#") for link in page.links), page.links
    assert page.csp.startswith("default-src 'none'") and "http" not in page.csp
    assert "@import" not in page.source.split("</style>")[0]
    assert page.source.count("plotly.js v") == 1
    for plot in page.plots.values():
        plotly.graph_objects.Figure(plot)  # knows every key and its values


WEIGHED_BY = {
    "logp_abs_diff_mean": "tokens",
    "k3_kl": "tokens",
    "f_2": "tokens",
    "seq_k3_kl": "sequences",
    "ess_seq": None,
}
"""Metrics of the table, and the count by which their mean over steps is weighed."""


@pytest.mark.parametrize("split", ["train", "eval/unfamiliar"])
def test_numbers_in_the_table_are_those_of_the_stream(split: str, arms: Path, page: Page) -> None:
    """Oracle: plain loops over the JSON lines."""
    raw = [json.loads(line) for line in (arms / "bf16/metrics-000.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in raw if line["kind"] == "step" and line["split"] == split]
    for metric, count in WEIGHED_BY.items():
        weights = [step[f"mismatch/{count}"] if count else 1.0 for step in steps]
        values = [step[f"mismatch/{metric}"] for step in steps]
        expected = math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)
        assert float(page.cells["bf16", split, metric] or "nan") == pytest.approx(expected, rel=1e-12)


def test_plots_hold_the_numbers_of_the_stream(arms: Path, page: Page) -> None:
    steps, values = read_run(arms / "fp16").series("mismatch/logp_abs_diff_mean")
    plot = page.plots["plot-gap-mean"]
    mine = next(trace for trace in plot["data"] if trace["name"] == "fp16")
    assert (mine["x"], mine["y"]) == (steps, values)
    assert plot["layout"]["yaxis"]["type"] == "log"


def test_rewards(tmp_path: Path) -> None:
    with run_stream(tmp_path, header=header("a")) as stream:
        for step in range(12):
            stream.step(step, {"mismatch/logp_abs_diff_mean": 0.01, "reward": float(step)})
    (row,) = summarize(load_runs(tmp_path)).rows
    # Steps 0..4 average to 2, steps 7..11 to 9.
    assert (row.reward_first, row.reward_last) == (2.0, 9.0)


@pytest.mark.parametrize(("counts", "mean"), [((10.0, 30.0), 0.75), ((10.0, None), 0.0), ((None, None), 0.5)])
def test_means_are_weighted_and_leave_out_steps_that_do_not_say_how_much_they_measured(
    counts: tuple[float | None, ...], mean: float, tmp_path: Path
) -> None:
    with run_stream(tmp_path, header=header("a")) as stream:
        for step, count in enumerate(counts):
            tokens = {} if count is None else {"mismatch/tokens": count}
            stream.step(step, {"mismatch/logp_abs_diff_mean": float(step)} | tokens)
    (row,) = summarize(load_runs(tmp_path)).rows
    assert row.values["logp_abs_diff_mean"] == mean


@pytest.mark.parametrize(
    ("mean", "k3", "level"),
    [
        (None, None, "unknown"),
        (None, 0.0, "small"),
        (0.0, 0.0, "same"),
        (SAME_ABS_DIFF, 1.0, "same"),
        (2e-4, 1e-8, "small"),
        (HEALTHY_ABS_DIFF, None, "small"),
        (0.005, 2e-3, "elevated"),
        (0.05, 1e-3, "elevated"),
        (0.05, 1e-2, "large"),
        (STALE_ABS_DIFF, 0.0, "large"),
    ],
)
def test_levels(mean: float | None, k3: float | None, level: str) -> None:
    assert level_of(mean, k3) == level


@pytest.mark.parametrize(
    ("mean", "k3", "words"),
    [
        (2e-6, None, "computes the same policy on both sides: nothing to do."),
        (0.012, None, "has a small gap: no correction is needed"),
        (0.05, None, "set mismatch.precision.dtype to float16"),
        (0.2, None, "check weight sync"),
        (0.004, 4e-3, "Few tokens carry the gap"),
    ],
)
def test_the_verdict_follows_the_data(mean: float, k3: float | None, words: str, tmp_path: Path) -> None:
    assert words in say(flat_run(tmp_path, mean, k3=k3, name="bf16"))


def test_the_worst_split_decides(tmp_path: Path) -> None:
    worst = say(flat_run(tmp_path, 0.005, name="bf16", eval_mean=0.04))
    assert "0.005, 0.04 on eval/long" in worst and "above what healthy runs report" in worst


def test_the_verdict_compares_runs(arms: Path) -> None:
    sentence = say(arms)
    assert sentence.startswith("fp32 (mean |Δlogp| ") and "same policy on both sides, fp16 (" in sentence
    assert re.search(r"bf16 is (7|8|9)(\.\d)? times as far apart as fp16", sentence)
    assert re.search(r"\. bf16 is .* as fp16\. What to do: prefer fp16\.$", sentence)


def test_the_verdict_compares_no_runs_of_different_models(tmp_path: Path) -> None:
    for name, mean, parameters in (("small", 2e-4, 595328), ("real", 0.05, 134515008)):
        run = {"name": name, "host": "trl 1.16.0", "model_type": "llama", "parameters": parameters}
        flat_run(tmp_path / name, mean, name=name, run=run)
    sentence = say(tmp_path)
    assert "as far apart as" not in sentence and sentence.endswith("set mismatch.precision.dtype to float16.")


@pytest.mark.parametrize(
    ("logged", "engine", "words"),
    [
        ({"k3_kl": math.nan}, "float16", "1 steps hold NaN or infinite mismatch metrics"),
        ({"support_truncated": 1.0}, "float16", "switch top_p, top_k and min_p off"),
        ({"phantom_clip_frac": 0.12}, "bfloat16", "stops 12% of the tokens"),
    ],
)
def test_a_metric_that_names_a_cause_comes_first(
    logged: dict[str, float], engine: str, words: str, tmp_path: Path
) -> None:
    with run_stream(tmp_path, header=header("fp16", engine={"model_dtype": engine})) as stream:
        metrics = {"logp_abs_diff_mean": 1e-3} | logged
        stream.step(1, {f"mismatch/{name}": value for name, value in metrics.items()})
    assert words in say(tmp_path)


def test_a_failed_weight_check_comes_first(tmp_path: Path) -> None:
    stale = flat_run(tmp_path, 0.3, name="fp16")
    with run_stream(stale, header=header("fp16"), resume_step=2) as stream:
        stream.event(2, "error", "weight_sync", "engine holds the weights of step 1")
    assert say(stale).endswith("the weight-sync check failed at step 2, so fix the weight sync first.")


@pytest.mark.parametrize(
    ("engine", "probes", "words"),
    [
        ("bfloat16", 0.03, "trainer computes in float16 and its engine in bfloat16, so give both one dtype."),
        ("bfloat16", 0.009, "in bfloat16, which explains 0.009 of it"),
        ("float16", 0.009, ": rounding explains 0.009 of it"),
        ("float16", 0.06, ": rounding alone does not explain it"),
    ],
)
def test_probes_tell_how_much_dtypes_explain(engine: str, probes: float, words: str, tmp_path: Path) -> None:
    run = flat_run(tmp_path, 0.05, name="fp16", engine={"model_dtype": engine})
    with run_stream(run, header=header("fp16", engine={"model_dtype": engine}), resume_step=2) as stream:
        stream.step(3, {"mismatch/logp_abs_diff_mean": 0.05, "mismatch/weight_sync_gap": probes})
    assert words in say(run)


@pytest.mark.parametrize(("mean", "level"), [(0.005, "warned"), (0.05, "elevated")])
def test_a_check_that_failed_leaves_no_gap_small(mean: float, level: str, tmp_path: Path) -> None:
    run = flat_run(tmp_path, mean, name="bf16")
    with run_stream(run, header=header("bf16"), resume_step=2) as stream:
        checks = Checks(False, lambda: 2)
        checks.report_to(stream.event)
        with pytest.warns(UserWarning, match=r"top_p"):
            checks.note("sampling", "the engine samples with top_p 0.9.")
    assert "The check sampling failed" in say(run) and "no correction is needed" not in say(run)
    assert build(run).judged[0].level == level


def test_an_alarm_leaves_no_gap_small(tmp_path: Path) -> None:
    alarm = {"metric": "mismatch/k3_kl", "first_step": 1, "threshold": 1e-3, "side": "above", "status": "raised"}
    run = flat_run(tmp_path, 0.005, name="bf16")
    with run_stream(run, header=header("bf16"), resume_step=2) as stream:
        stream.event(3, "warning", "alarm", "k3_kl is 0.002", alarm)
    assert "From step 1 on the rollout policy is further from the trainer's than in healthy runs" in say(run)


def test_profiles_pool_by_token_count(tmp_path: Path) -> None:
    run = flat_run(tmp_path, 0.05, name="bf16")
    with run_stream(run, header=header("bf16"), resume_step=2) as stream:
        for step, count, mean in ((1, [1, 9], [4.0, 0.0]), (2, [3, 7], [2.0, 1.0])):
            columns = dict.fromkeys(("abs_diff_mean", "abs_diff_max", "k3_mean"), mean)
            stream.profile(step, {"probability": {"edges": [0, 0.5, 1], "count": count, **columns}})
    found = pool_profile(read_run(run), "probability", "train")
    # (1*4 + 3*2) / 4 and (9*0 + 7*1) / 16; shares 10 and 7 of 17.
    assert found is not None
    assert found.count == (4, 16) and found.mean == (2.5, 0.4375) and found.largest == (4.0, 1.0)
    assert found.gap_share == (10 / 17, 7 / 17)


def test_the_dtype_of_a_side_is_what_it_computes_in() -> None:
    assert side_dtype({"autocast_dtype": "torch.float16", "parameter_dtypes": {"float32": 9}}) == "float16"
    assert side_dtype({"autocast_dtype": None, "parameter_dtypes": {"torch.float32": 9}}) == "float32"
    assert side_dtype({"parameter_dtypes": ["float32", "float16"]}) is None


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "bf16", steps=3, finish=False)
    content = (run / "metrics-000.jsonl").read_bytes()
    end_of_a_step = content.index(b"\n", content.index(b'"kind": "step"'))
    (run / "metrics-000.jsonl").write_bytes(b"garbage\n" + content[: end_of_a_step + 20])
    text = rendered(run).text
    for part in ("This report is not complete", "line 1 was left out", "is torn", "no end line", "no token sample"):
        assert part in text, part


@pytest.mark.parametrize("content", [b"", b"\n\n", b"garbage", b'{"kind":"header","schema":1,"segment":0}\n'])
def test_files_without_a_step_are_rendered(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics-000.jsonl").write_bytes(content)
    report = build(tmp_path)
    assert "nothing can be said about the two policies" in report.verdict
    assert "no step was recorded" in Page(report.path).text


def test_a_missing_file_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no metrics-"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_report_is_an_error(tmp_path: Path) -> None:
    run = flat_run(tmp_path / "run", 1e-5)
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        build(run, tmp_path / "file" / "report.html")


@pytest.mark.parametrize("name", ["</script><img src=x onerror=alert(1)>", '" onload="x'])
def test_hostile_names_stay_text(tmp_path: Path, name: str) -> None:
    with run_stream(tmp_path, header=header(name, patches=[{"name": name, "target": name}])) as stream:
        stream.step(1, {"mismatch/logp_abs_diff_mean": 0.01})
        stream.event(1, "error", name, name)
    hostile = rendered(tmp_path)
    assert hostile.tags["img"] == 0 and hostile.tags["script"] == len(hostile.plots) + 2
    assert name in hostile.text
    # Plotly reads names as markup, so they are escaped once more inside the data.
    assert hostile.plots["plot-gap-mean"]["data"][0]["name"] == html.escape(name)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        flat_run(tmp_path / folder, 0.01, name="same")
    assert list(load_runs(tmp_path)) == ["first", "second"]


def test_a_run_that_is_named_by_its_path_is_shown_by_its_folder(tmp_path: Path) -> None:
    """TRL's default name of a run is its output folder."""
    flat_run(tmp_path / "first" / "mismatch", 0.01, name="runs/first")
    flat_run(tmp_path / "second", 0.01, name="runs/2")
    assert list(load_runs(tmp_path)) == ["first", "runs/2"]


def test_zeros_are_gaps_on_log_axes(tmp_path: Path) -> None:
    with run_stream(tmp_path, header=header("a")) as stream:
        for step, value in enumerate((1e-3, 0.0, 1e-4)):
            stream.step(step, {"mismatch/logp_abs_diff_mean": value})
    assert rendered(tmp_path).plots["plot-gap-mean"]["data"][0]["y"] == [1e-3, None, 1e-4]


def test_a_missing_renderer_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = flat_run(tmp_path / "run", 0.01)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(PeerVersionError, match=r"pip install .plotly>=6."):
        build(run)


def stale_run(folder: Path, *, numerics: float | None) -> Path:
    """Write a bfloat16 run of stale rollouts, of whose drift numerics are a part, or unknown."""
    logged = {
        "tokens": 100.0,
        "logp_abs_diff_mean": 0.06,
        "k3_kl": 0.06**2,
        "staleness_max": 2.0,
        "staleness_mean": 1.5,
    }
    if numerics is not None:
        logged |= {"numerics/tokens": 40.0, "numerics/k3_kl": numerics**2, "numerics/logp_abs_diff_mean": numerics}
        logged |= {"stale/tokens": 60.0, "stale/logp_abs_diff_mean": 0.06}
    with run_stream(folder, header=header("bf16")) as stream:
        for step in range(1, 4):
            stream.step(step, {f"mismatch/{key}": value for key, value in logged.items()})
    return folder


@pytest.mark.parametrize(
    ("numerics", "words"),
    [
        (0.002, "0.002 of numerics, 0.06 with the drift of stale rollouts) has a small gap"),
        (0.05, "set mismatch.precision.dtype to float16."),
        (None, "has stale rollouts and no token of one version"),
    ],
)
def test_no_precision_is_advised_for_what_is_drift(numerics: float | None, words: str, tmp_path: Path) -> None:
    said = say(stale_run(tmp_path, numerics=numerics))
    assert words in said
    assert ("float16" in said) == (numerics == 0.05)


def test_numerics_and_drift_have_plots_where_rollouts_are_stale(tmp_path: Path) -> None:
    figures = figures_of(load_runs(stale_run(tmp_path, numerics=0.002)), "drift")
    assert [figure.id for figure in figures] == ["numerics", "stale", "staleness"]


ODD_LINES = (Path(__file__).parents[1] / "data/odd_logs/rendered.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("number", range(len(ODD_LINES) + 1))
def test_whatever_can_be_read_can_be_rendered(number: int, tmp_path: Path) -> None:
    """A log without one of the odd lines, and the one with all of them."""
    lines = ODD_LINES[:number] + ODD_LINES[number + 1 :]
    (tmp_path / "metrics-000.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert rendered(tmp_path).tags["h1"] == 1


def test_replay_is_plotted_where_it_was_measured(tmp_path: Path) -> None:
    flips = "mismatch/routing/layer_12_set_mismatch"
    with run_stream(tmp_path, header=header("replayed")) as stream:
        stream.step(1, {"mismatch/k3_kl": 1e-4, "mismatch/native/k3_kl": 1e-3})
        stream.step(2, {"mismatch/routing/compared_tokens": 100, flips: 0.25})
        stream.step(3, {"mismatch/routing/compared_tokens": 300, flips: 0.05})
    figures = {figure.id: json.loads(figure.json) for figure in figures_of(load_runs(tmp_path), "routing")}
    (by_layer,) = figures["flips-by-layer"]["data"]
    # Layer 12: (100 * 0.25 + 300 * 0.05) / 400.
    assert by_layer["x"] == [12] and by_layer["y"] == pytest.approx([0.1])


def test_a_report_says_what_replay_saves_and_does_not_advise_it(tmp_path: Path) -> None:
    """Of the second log alone k3 without replay is known."""
    head = header("fp16", config={"routing": {"mode": "R3"}}, run={"name": "moe", "model_type": "qwen3_moe"})
    with run_stream(tmp_path, header=head) as stream:
        for step, measured in enumerate(({}, {"native/k3_kl": 8e-3, "native/tokens": 5.0}, {}), 1):
            gap = {"logp_abs_diff_mean": 4e-3, "k3_kl": 2e-4 * step, "routing/set_mismatch_frac": 0.012, **measured}
            stream.step(step, {f"mismatch/{name}": value for name, value in gap.items()})
    built = build(tmp_path)
    assert "Without replay k3 is 0.008, with it 4.0e-4" in built.verdict and "experts flip" not in built.verdict
    (run,) = built.to_dict()["runs"].values()
    assert (run["k3_without_replay"], run["k3_with_replay"], run["other_experts"]) == pytest.approx((8e-3, 4e-4, 0.012))


@pytest.mark.parametrize(("model_type", "blamed"), [("qwen3", False), ("qwen3_moe", True)])
def test_experts_are_blamed_only_where_there_are_some(model_type: str, blamed: bool, tmp_path: Path) -> None:
    said = say(flat_run(tmp_path, 0.004, k3=4e-3, name="fp16", run={"name": "fp16", "model_type": model_type}))
    assert "Few tokens carry the gap" in said
    assert ("as when experts flip" in said) == blamed
