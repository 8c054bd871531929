"""CUDA's names on a CPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_importing_the_module_changes_nothing_and_uninstall_restores_all():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = python(
        "import json, torch\nfrom megatron_memo import cpu\n"
        "names = lambda: {f'{o.__name__}.{n}': getattr(o, n) for o, n, _ in cpu._NAMES}\n"
        "before = names(); fresh = not cpu.active()\n"
        "cpu.install(); cpu.install()\n"
        "during = names(); x = torch.zeros(2, device='cuda')\n"
        "cpu.uninstall(); after = names()\n"
        "print(json.dumps(dict(fresh=fresh, device=str(x.device), changed=sum(during[k] is not v for k, v in before.items()), names=len(before),\n"
        "    restored=[k for k, v in before.items() if after[k] is not v and after[k] != v], active=cpu.active())))"
    )
    assert found["fresh"] and not found["active"]
    assert found["device"] == "cpu"
    assert found["changed"] == found["names"]
    assert found["restored"] == []


def test_megatron_that_was_imported_first_is_refused():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = python(
        "import json, sys, types\nsys.modules['megatron.core'] = types.ModuleType('megatron.core')\nfrom megatron_memo import cpu\n"
        "from megatron_memo.errors import ConfigError\n"
        "try:\n    cpu.install(); print(json.dumps('installed'))\nexcept ConfigError as error:\n    print(json.dumps(str(error)))"
    )
    assert "imported before" in found


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_torchs_norms_take_part_in_sequence_parallelism(kind):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = python(
        "import json\nfrom megatron_memo import cpu\ncpu.install()\n"
        "from types import SimpleNamespace as N\nfrom megatron.core.transformer.torch_norm import WrappedTorchNorm\n"
        f"c = N(layernorm_zero_centered_gamma=False, persist_layer_norm=False, sequence_parallel=True, memory_efficient_layer_norm=False, normalization={kind!r})\n"
        "n = WrappedTorchNorm(c, 8)\nprint(json.dumps([type(n).__name__, [p.sequence_parallel for p in n.parameters()], c.sequence_parallel]))"
    )
    assert found[0] == kind and found[1] and all(found[1]) and found[2]
