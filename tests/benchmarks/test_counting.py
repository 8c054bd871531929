"""Operations, rates, modes, profiles and tables of the benchmarks: what needs no Megatron."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import ceiling
import harness
import modes
import profiling
import table


def test_flops_of_a_gpt_layer_are_the_papers():
    """3 L (24 s h^2 + 2 s^2 h) / TP for a fourfold MLP and as many key heads as query heads."""
    s, h, layers, tp = 1 << 20, 4096, 2, 8
    shape = harness.Shape(s, layers, h, 32, 32, 4 * h, tp=tp)
    assert harness.step_flops(shape) == pytest.approx(3 * layers * (24 * s * h**2 + 2 * s**2 * h) / tp, rel=1e-12)


def test_flops_follow_gating_and_grouped_queries():
    shape = harness.Shape(1000, 1, 64, 8, 2, 160, gated=True, micro_batch=3, tp=1)
    weights = 64 * (64 + 2 * 2 * 8) + 64 * 64 + 64 * 320 + 160 * 64
    assert harness.linear_flops(shape) == 2 * 1000 * 3 * weights
    assert harness.attention_flops(shape) == 2 * 1000**2 * 64 * 3


def test_a_rate_above_the_chips_peak_is_refused(monkeypatch):
    monkeypatch.setattr(harness, "peak_tflops", lambda: 989.4)
    assert harness.checked_tflops("attention", 5e14, 1.0) == pytest.approx(500.0)
    with pytest.raises(harness.ImplausibleRate, match=r"attention: .* are 5620 TFLOP/s, above this chip's peak of 989.4"):
        harness.checked_tflops("attention", 5.62e15, 1.0)


def test_modes_say_what_they_are():
    assert modes.parse_mode("keep-all", "te") == modes.Mode("keep-all@te", "keep-all", "te")
    assert modes.parse_mode("full-recompute@te", "fa4").attention == "te"
    assert modes.parse_mode("memo:16:0.25:2@fa4", "te") == modes.Mode("memo:16:0.25:2@fa4", "memo", "fa4", 16, 0.25, 2, 0.0)
    assert modes.parse_mode("memo:4:0.5:1:0.25", "te").keep == 0.25


@pytest.mark.parametrize("text", ["memo", "memo:4", "memo:4:1", "memo:4:1:0:0:0", "keep-all:2", "everything", "keep-all@fa3"])
def test_a_mode_that_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match=text):
        modes.parse_mode(text, "te")


def test_settings_changed_for_full_recompute_come_back_also_after_an_error():
    config = type("Config", (), dict(recompute_granularity=None, recompute_method=None, recompute_num_layers=None))()
    with pytest.raises(KeyError):
        with modes.full_recompute(config):
            assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "uniform", 1)
            raise KeyError
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == (None, None, None)


def test_differences_are_relative_and_worst_of_all():
    a = torch.tensor([3.0, 4.0])
    assert harness.relative_difference(a * 1.5, a) == pytest.approx(0.5)
    assert harness.relative_difference(torch.tensor([3.0, 4.0]), a, chunk=1) == 0.0
    assert harness.worst_difference({"p": a, "q": a * 2}, {"p": a, "q": a}) == (pytest.approx(1.0), "q")


def test_a_gradient_that_is_not_a_number_is_no_agreement():
    a = torch.ones(3)
    assert harness.relative_difference(torch.tensor([1.0, float("nan"), 1.0]), a) == 1e9
    assert harness.relative_difference(torch.tensor([1.0, float("inf"), 1.0]), a) == 1e9


def test_kernels_are_put_into_groups_by_name():
    named = {
        "Memcpy DtoH (Device -> Pinned)": "copy to host",
        "Memcpy HtoD (Pinned -> Device)": "copy from host",
        "Memcpy DtoD (Device -> Device)": "copy on device",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object": "attention backward",
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object": "attention forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7": "attention backward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention forward",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "linears",
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>": "rope",
        "void transformer_engine::normalization::rmsnorm_fwd_general_kernel": "norm",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "activation",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise and other",
    }
    assert {name: profiling.group_of(name) for name in named} == named


def test_idle_time_is_what_no_kernel_covers_and_copies_do_not_cover():
    events = [("gemm a", 0.0, 4000.0), ("gemm b", 3000.0, 5000.0), ("Memcpy DtoH (Device -> Pinned)", 5000.0, 9000.0), ("add", 8000.0, 10000.0)]
    table_of = profiling.summary(events)
    assert (table_of["span_ms"], table_of["busy_ms"], table_of["idle_ms"]) == (10.0, 7.0, 3.0)
    assert table_of["groups_ms"] == {"linears": 6.0, "copy to host": 4.0, "elementwise and other": 2.0}
    assert {"name": "gemm a", "group": "linears", "ms": 4.0, "count": 1} in table_of["kernels"]
    assert table_of["kernels"][-1]["ms"] == 2.0
    assert "none 3.0 ms" in profiling.as_text(table_of)


def test_a_ceiling_takes_the_median_attention_and_the_fastest_linears():
    shape = harness.Shape(4096, 2, 64, 8, 8, 256, tp=1)
    measurements = [
        {"attention": "fa4", "linears_forward_s": 0.2, "attention_samples_s": [(9.0, 9.0), (1.0, 2.0)]},
        {"attention": "fa4", "linears_forward_s": 0.1, "attention_samples_s": [(1.5, 2.5)]},
    ]
    combined = ceiling.combine(shape, measurements)
    assert combined["layer_s"] == pytest.approx(1.5 + 2.5 + 0.3) and combined["step_s"] == pytest.approx(2 * combined["layer_s"])


def test_a_results_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "deep" / "out.json"
    harness.write_json(str(path), {"a": 1})
    with pytest.raises(TypeError):
        harness.write_json(str(path), {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def layer_stack_result():
    def timed(median_s, **more):
        return {"steps": [], "median_s": median_s, "spread_percent": 0.5, "new_segments": [0, 1], **more}

    return {
        "benchmark": "layer_stack",
        "rank": "loopback rank of 8",
        "peak_tflops": 989.4,
        "versions": {"torch": "2.11.0"},
        "shape": {"tokens": 524288, "layers": 4},
        "ceiling": {
            "attention": "fa4", "attention_forward_tflops": 657.0, "attention_backward_tflops": 615.0, "linears_tflops": 767.0,
            "layer_s": 1.7, "tflops": 544.0,
        },
        "modes": {
            "full-recompute@fa4": timed(10.0),
            "memo:8:0:1@fa4": timed(8.0, stall_ms=1.25, host_peak_gib=4.0),
            "keep-all@te": {"steps": [], "error": "OutOfMemoryError: 4 GiB"},
        },
    }


def test_a_table_has_a_row_a_mode_and_ratios_to_the_first(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(layer_stack_result()))
    text = table.tables([str(path)])
    assert "| 524,288, 4 | memo:8:0:1@fa4 | 8.0000 | 0.50 | 1.250 |" in text
    assert "OutOfMemoryError: 4 GiB" in text and "657 forward / 615 backward" in text and "torch 2.11.0" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


def test_a_file_of_no_benchmark_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"benchmark": "else"}')
    with pytest.raises(ValueError, match="x.json: expected a result of layer_stack"):
        table.tables([str(path)])
