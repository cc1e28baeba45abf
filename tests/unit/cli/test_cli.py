"""The command line: what render shows for a mod, how errors look, and the demo at a tiny size."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexattn.cli import demo
from flexattn.cli.app import app
from flexattn.device import KNOWN
from flexattn.mods.bind import clear
from flexattn.records.record import Failed
from flexattn.settings import override
from flexattn.tuning.builds import BuiltConfig
from flexattn.verify.gate import ErrorRow, Verdict
from tests.processes import python
from tests.records import decode_record


@pytest.fixture
def flexattn(tmp_path):
    """Run the command line in this process, with rendered files in a folder of the test's own."""

    def call(*arguments, status=0):
        clear()  # a number that other tests traced with another value would be an argument
        with override(cache_dir=tmp_path):
            result = CliRunner().invoke(app, list(arguments), terminal_width=200)
        assert result.exit_code == status, result.output
        return result

    return call


def test_render_shows_expression_config_and_source(flexattn, tmp_path):
    shown = flexattn("render", "softcap_50").stdout
    assert "score_mod (tanh((score / 50.0)) * 50.0)" in shown
    path = next(line.split()[1] for line in shown.splitlines() if line.startswith("source"))
    assert path.startswith(str(tmp_path))
    text = Path(path).read_text()
    assert text.startswith("# prefill bfloat16") and shown.endswith(text)


def test_render_explains_the_rules_and_leaves_out_those_that_are_off(flexattn):
    shown = flexattn("render", "alibi", "--explain").stdout
    assert "rule      row_slope: " in shown and "term      column: " in shown
    assert "rule      decay_skip: " in shown
    assert "@triton.jit" not in shown
    found = json.loads(
        flexattn(
            "render",
            "alibi",
            "--explain",
            "--option",
            "RULES_OFF=row_slope,row,decay_skip",
            "--json",
        ).stdout
    )
    assert {row["name"] for row in found["rewrites"]} == {"core", "rest"}
    unknown = flexattn("render", "alibi", "--option", "RULES_OFF=x", status=2).stderr
    assert "the rules are mask, " in unknown


def test_render_prints_the_tanh_that_is_asked_for(flexattn):
    exact = flexattn("render", "softcap_50", "--option", "TANH=exact").stdout
    assert "libdevice.tanh(" in exact and "fast_tanh" not in exact
    half = ("render", "softcap_50", "--dtype", "float16")
    assert "short_tanh(" in flexattn(*half).stdout
    assert "tanh.approx.f32" in flexattn(*half, "--option", "TANH=fast").stdout


def test_render_of_a_factory_by_its_import_path(flexattn):
    shown = flexattn(
        "render", "flexattn.catalogue:sliding_window", "--arg", "77", "--show", "expr",
        "--block-size", "64",
    ).stdout  # fmt: skip
    assert "77" in shown and "blocks=64x64" in shown and "@triton.jit" not in shown


def test_render_takes_a_problem_and_kernel_options(flexattn):
    found = json.loads(
        flexattn(
            "render", "causal", "--kind", "decode", "--head-dim", "192", "--head-dim-v", "128",
            "--dtype", "float16", "--device", "nvidia-rtx-4090", "--heads", "12:4",
            "--option", "BLOCK_N=32", "--option", "num_stages=2", "--json",
        ).stdout
    )  # fmt: skip
    assert found["problem"].startswith("decode float16 B=1 Hq=12 Hkv=4 q_len=1")
    assert "D=192/128" in found["problem"] and found["device"] == "nvidia-rtx-4090 (sm_89)"
    assert "BLOCK_N=32" in found["config"] and found["origin"] == "kernel_options"
    assert Path(found["combine_path"]).exists() and "@triton.jit" in found["source"]
    assert found["ptx"] is None and found["resources"] is None


@pytest.mark.compile
@pytest.mark.slow
def test_render_compiles_for_a_device_that_is_not_here(flexattn):
    arguments = ("--head-dim", "64", "--show", "ptx", "--show", "resources", "--json")
    found = json.loads(flexattn("render", "scaled", *arguments).stdout)
    assert ".target sm_90" in Path(found["ptx"]).read_text()
    assert found["resources"]["registers"] > 0 and found["resources"]["matrix_instructions"] > 0
    assert found["source"] is None and found["score_mod"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["casual"], ["did you mean causal?", "rule:", "softcap_50", "do:"]),
        (["causal", "--arg", "3"], ["flexattn.catalogue:softcap --arg 50.0"]),
        (["softcap"], ["do:", "flexattn.catalogue:softcap --arg"]),
        (["causal", "--head-dim", "1000"], ["D=1000", "at most 576"]),
        (["no_such_module:f"], ["cannot import 'no_such_module'", "PYTHONPATH"]),
        (["flexattn.catalogue:sofcap"], ["no 'sofcap' there", "did you mean softcap?"]),
        (["flexattn.catalogue:softcap"], ["takes 1 arguments", "--arg"]),
        (["flexattn.catalogue:softcap", "--arg", "1", "--arg", "2"], ["softcap(1, 2)"]),
        (["flexattn:__version__"], ["is a str", "can be called"]),
        (["causal", "--device", "h20"], ["no device is called 'h20'", "did you mean h200?"]),
        (["causal", "--heads", "7:2"], ["7 query heads and 2 key heads"]),
        (["causal", "--option", "BLOCK_M=24"], ["BLOCK_M is a power of two of at least 16"]),
    ],
    ids=lambda value: "-".join(value) if value[0][0] != "d" else None,
)
def test_errors_say_what_was_got_and_what_to_do(flexattn, arguments, words):
    result = flexattn("render", *arguments, status=2)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def test_a_mod_of_a_file_beside_the_caller(flexattn, tmp_path, monkeypatch):
    (tmp_path / "my_mods_of_test_cli.py").write_text(
        "def even(b, h, q_idx, kv_idx):\n    return (q_idx + kv_idx) % 2 == 0\n"
    )
    monkeypatch.chdir(tmp_path)
    shown = flexattn("render", "my_mods_of_test_cli:even", "--show", "expr").stdout
    assert "mask_mod" in shown and "% 2" in shown


def test_devices_lists_what_can_be_named(flexattn):
    shown = flexattn("devices").stdout
    assert all(name in shown for name in KNOWN)


@pytest.mark.parametrize("columns", ["", "80"])
def test_no_cell_of_the_devices_is_cut(flexattn, monkeypatch, columns):
    """In a pipe, and at 80 columns, a heading was cut."""
    monkeypatch.setenv("COLUMNS", columns)
    shown = flexattn("devices").stdout
    assert "…" not in shown and "registers" in shown


def test_the_demo_runs_the_same_calls_small_and_full():
    assert [row.title for row in demo.SMALL_ROWS] == [row.title for row in demo.FULL_ROWS]
    gemma, decode = demo.FULL_ROWS[1:]
    assert (gemma.score.args, gemma.mask.args, gemma.shape.D) == ((50.0,), (demo.WINDOW,), 256)
    assert gemma.shape.Hq == 2 * gemma.shape.Hkv
    assert (decode.shape.Hq, decode.shape.Hkv, decode.shape.D) == (32, 8, 128)
    assert decode.shape.q_len == 1 and decode.mask is None


def test_a_demo_without_a_gpu_fails_by_a_wrong_result_and_by_a_process_that_died(
    flexattn, monkeypatch
):
    right = Verdict((ErrorRow("out", 1e-4, 2e-4, 1e-4),), (), ())
    over, died = Verdict((), ("over budget",), ()), Failed("crash", "SIGSEGV", "ended")
    built = [("c", BuiltConfig(decode_record().config, 168))]
    monkeypatch.setattr(demo, "compile_rows", lambda: built)
    for found, other, status in (
        (right, "", 0), (over, "over budget", 1), (died, "crash: SIGSEGV: ended", 1)
    ):  # fmt: skip
        trials = [right, found]
        monkeypatch.setattr(demo, "interpreted", lambda trials=trials: trials)
        shown = flexattn("demo", status=status).stdout
        assert "error 1.0e-04 of 2.0e-04, gate green" in shown and "168 registers" in shown
        assert other in shown and ("The demo passed" in shown) == (not status)


SMOKE = """
    import sys
    from dataclasses import replace
    from pathlib import Path

    from rich.console import Console

    from flexattn.cli import bench, demo
    from tests.quick_interpreter import hurry

    hurry()
    tiny = [
        demo.demo_row("window", (2, 1), 16, (1, 71, 71), 20),
        demo.demo_row("decode", (4, 2), 16, (1, 1, 71)),
    ]
    if sys.argv[1] == "wrong":
        right = bench.flex_attention
        bench.flex_attention = lambda *a, **k: right(*a, **k) * 1.1
    method = replace(demo.METHOD, budget_s=0.0)  # the default and what is nearest to it
    passed = demo.show_gpu(Console(width=200), Path(sys.argv[2]), tiny, "cpu", "none", method)
    print("all green" if passed else "something red")
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "last"), [("right", "all green"), ("wrong", "something red")], ids=str
)
def test_demo_tunes_judges_races_and_draws(kernel, last, tmp_path):
    """On the CPU: the interpreter for the GPU, and nothing in the place of torch's kernel."""
    out, _ = python("-c", SMOKE, kernel, tmp_path, interpret=True)
    assert out.splitlines()[-1] == last
    assert list((tmp_path / "records").rglob("*.json"))
    assert "window" in (tmp_path / "index.html").read_text()
