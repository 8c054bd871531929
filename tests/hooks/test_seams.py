"""Hooks on a small made-up package, and one on the installed Megatron."""

from __future__ import annotations

import re
import functools
import subprocess
import sys
import types

import pytest

from megatron_memo.errors import SeamError
from megatron_memo.hooks import seams
from megatron_memo.hooks.seams import Hook, check, install

SOURCE = """
def forward(x, scale=1):
    return ("stock", x, scale)

class Base:
    def run(self, x):
        return ("base", x)
    @staticmethod
    def fixed(x):
        return ("fixed", x)
    @classmethod
    def named(cls, x):
        return (cls.__name__, x)
    size = 3
    def __call__(self):
        return "called"

class Derived(Base):
    pass

class Outer:
    class Inner:
        def deep(self, *args, **kwargs):
            return ("deep", args)
"""


@pytest.fixture
def tree(monkeypatch):
    """Loaded modules megatron.memo_fake (functions and classes), megatron.memo_fake_user and memo_fake_script (both: from it import forward)."""
    names = ("megatron.memo_fake", "megatron.memo_fake_user", "memo_fake_script")
    modules = [types.ModuleType(name) for name in names]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(modules[0]))
    for name in ("Base", "Derived", "Outer"):
        setattr(vars(modules[0])[name], "__module__", names[0])
    for user in modules[1:]:
        user.forward = modules[0].forward
    yield modules
    # A test that fails while hooks are in must not spoil the next one.
    for key in [key for key, (target, _) in seams._installed.items() if "memo_fake" in target]:
        del seams._installed[key]


def marked(original):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return ("ours", original(*args, **kwargs))

    return replacement


def hook(path, parameters=None, replacement=marked):
    return Hook(f"megatron.memo_fake:{path}", replacement, "the test wants it", parameters)


def contents(module):
    """What every name of the module and of its classes holds, as the owners hold it."""
    held = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, type):
            held.update({f"{name}.{inner}": thing for inner, thing in vars(value).items() if not inner.startswith("__")})
    return held


def same_contents(before, after):
    return before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def test_a_function_and_its_aliases_are_replaced_and_restored(tree):
    fake, user, _ = tree
    original = fake.forward
    installation = install([hook("forward", ("x", "scale"))])
    assert fake.forward(1) == user.forward(1) == ("ours", ("stock", 1, 1))
    assert fake.forward is user.forward
    assert set(installation.names) == {"megatron.memo_fake.forward", "megatron.memo_fake_user.forward"}
    installation.uninstall()
    assert fake.forward is original and user.forward is original


def test_aliases_in_the_running_script_are_replaced(tree, monkeypatch):
    fake = tree[0]
    script = types.ModuleType("__main__")
    script.step = fake.forward
    monkeypatch.setitem(sys.modules, "__main__", script)
    installation = install([hook("forward")])
    assert script.step is fake.forward
    installation.uninstall()
    assert script.step(1) == ("stock", 1, 1)


@pytest.mark.parametrize("by_name", [True, False])
def test_aliases_elsewhere_are_replaced_only_when_asked(tree, by_name):
    fake, _, script = tree
    original = fake.forward
    install([hook("forward")]).uninstall()
    first = install([hook("forward")])
    assert script.forward is original
    first.uninstall()
    second = install([hook("forward")], modules=["memo_fake_script" if by_name else script])
    assert script.forward is fake.forward is not original
    second.uninstall()
    assert script.forward is original


def test_names_taken_while_installed_are_restored_too(tree):
    fake, user, _ = tree
    installation = install([hook("forward")])
    user.late = fake.forward
    installation.uninstall()
    assert user.late is fake.forward and user.late(2) == ("stock", 2, 1)


def test_methods_keep_their_kind(tree):
    fake = tree[0]
    before = contents(fake)
    installation = install([hook("Base.run", ("self", "x")), hook("Base.fixed", ("x",)), hook("Base.named", ("cls", "x")), hook("Outer.Inner.deep")])
    base = fake.Base
    assert base().run(1) == ("ours", ("base", 1))
    assert base.fixed(1) == base().fixed(1) == ("ours", ("fixed", 1))
    assert base.named(1) == ("ours", ("Base", 1)) and fake.Derived.named(1) == ("ours", ("Derived", 1))
    assert fake.Outer.Inner().deep(1) == ("ours", ("deep", (1,)))
    installation.uninstall()
    assert same_contents(before, contents(fake))


def test_an_inherited_method_is_replaced_in_the_named_class_alone(tree):
    fake = tree[0]
    installation = install([hook("Derived.run", ("self", "x"))])
    assert fake.Derived().run(1) == ("ours", ("base", 1))
    assert fake.Base().run(1) == ("base", 1)
    installation.uninstall()
    assert "run" not in vars(fake.Derived) and fake.Derived().run(1) == ("base", 1)


@pytest.mark.parametrize("order", [("Base.run", "Derived.run"), ("Derived.run", "Base.run")])
def test_hooks_on_base_and_derived_class_do_not_depend_on_their_order(tree, order):
    fake = tree[0]
    before = contents(fake)
    installation = install([hook(path) for path in order])
    assert fake.Derived().run(1) == ("ours", ("base", 1))
    assert fake.Base().run(1) == ("ours", ("base", 1))
    installation.uninstall()
    assert same_contents(before, contents(fake))


@pytest.mark.parametrize(
    "bad, expected, found",
    [
        (hook("forward", ("y",)), "parameters that begin with (y)", "(x, scale)"),
        (hook("forward", ("x", "scale", "bias")), "(x, scale, bias)", "(x, scale)"),
        (hook("forward", (("y",), ("x", "size"))), "(y) or (x, size)", "(x, scale)"),
        (hook("Outer.Inner.deep", ("self", "args")), "(self, args)", "(self, *args, **kwargs)"),
        (hook("gone"), "a function gone of megatron.memo_fake", "none"),
        (hook("Gone.run"), "an attribute Gone of megatron.memo_fake", "none"),
        (hook("Base.size"), "a function", "a int"),
        (Hook("megatron.memo_missing:f", marked, "the test wants it"), "a module megatron.memo_missing", "ModuleNotFoundError"),
        (Hook("megatron.memo_fake", marked, "the test wants it"), "a target", "'megatron.memo_fake'"),
    ],
)
def test_one_hook_that_does_not_fit_installs_nothing(tree, bad, expected, found):
    before = [contents(module) for module in tree]
    assert check([hook("forward")]) == []
    assert [problem.hook for problem in check([hook("forward"), bad])] == [bad]
    with pytest.raises(SeamError) as error:
        install([hook("Base.run"), bad, hook("Base.fixed")])
    message = str(error.value)
    assert bad.target in message and expected in message and found in message and "the test wants it" in message
    assert "nothing was installed" in message and "megatron.memo_fake:Base.run" not in message
    assert all(same_contents(b, contents(module)) for b, module in zip(before, tree))


def test_every_hook_that_does_not_fit_is_named_at_once(tree):
    with pytest.raises(SeamError) as error:
        install([hook("gone"), hook("forward", ("y",)), hook("Base.run")])
    assert "memo_fake:gone" in str(error.value) and "memo_fake:forward" in str(error.value)


def test_the_error_names_megatrons_version_and_root(tree, monkeypatch):
    monkeypatch.setattr(seams, "megatron_version", lambda: "1.2.3")
    monkeypatch.setattr(seams, "megatron_root", lambda: "/some/checkout")
    with pytest.raises(SeamError, match=r"Megatron 1\.2\.3 from /some/checkout does not fit"):
        install([hook("gone")])


@pytest.mark.parametrize("parameters", [("self",), ("self", "x"), (("self", "y"), ("self", "x")), (), None])
def test_any_of_several_signatures_will_do(tree, parameters):
    assert check([hook("Base.run", parameters)]) == []


def test_installing_twice_is_an_error_that_says_so(tree):
    fake = tree[0]
    installation = install([hook("forward"), hook("Derived.run")])
    for path in ("forward", "Derived.run"):
        with pytest.raises(SeamError, match="installed earlier; uninstall that first"):
            install([hook(path)])
    assert fake.forward(1) == ("ours", ("stock", 1, 1))
    installation.uninstall()
    install([hook("forward")]).uninstall()
    assert fake.forward(1) == ("stock", 1, 1)


def test_two_hooks_for_one_function_are_an_error(tree):
    tree[1].Base = tree[0].Base
    with pytest.raises(SeamError, match="one hook for each function"):
        install([hook("Base.run"), Hook("megatron.memo_fake_user:Base.run", marked, "the test wants it twice")])
    assert tree[0].Base().run(1) == ("base", 1)


def test_uninstalling_twice_does_nothing_more(tree):
    fake = tree[0]
    first = install([hook("forward")])
    first.uninstall()
    second = install([hook("forward")])
    first.uninstall()
    assert fake.forward(1) == ("ours", ("stock", 1, 1))
    second.uninstall()


def test_a_replacement_that_cannot_be_made_installs_nothing(tree):
    before = contents(tree[0])

    def broken(original):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        install([hook("forward"), hook("Base.run", replacement=broken)])
    with pytest.raises(SeamError, match="expected a function"):
        install([hook("forward"), hook("Base.run", replacement=lambda original: None)])
    assert same_contents(before, contents(tree[0]))
    install([hook("forward")]).uninstall()


def test_a_failure_half_way_takes_back_what_was_installed(tree, monkeypatch):
    before = [contents(module) for module in tree]

    def fail(installation, made):
        raise RuntimeError("half way")

    monkeypatch.setattr(seams, "_replace_aliases", fail)
    with pytest.raises(RuntimeError, match="half way"):
        install([hook("forward"), hook("Derived.run"), hook("Base.fixed")])
    assert all(same_contents(b, contents(module)) for b, module in zip(before, tree))


def test_an_alias_that_stays_is_found(tree):
    fake, user, _ = tree

    class Stubborn(types.ModuleType):
        def __setattr__(self, name, value):
            pass

    stubborn = Stubborn("megatron.memo_fake_user")
    vars(stubborn)["forward"] = fake.forward
    sys.modules["megatron.memo_fake_user"] = stubborn  # the fixture's monkeypatch puts the old state back
    original = fake.forward
    with pytest.raises(SeamError, match="megatron.memo_fake_user.forward still hold"):
        install([hook("forward")])
    assert fake.forward is original


def test_a_function_replaced_by_somebody_else_is_not_trampled(tree):
    fake = tree[0]
    installation = install([hook("forward"), hook("Base.run")])
    ours = fake.forward
    fake.forward = theirs = lambda x: ours(x)
    with pytest.raises(SeamError, match="megatron.memo_fake.forward: replaced by somebody else"):
        installation.uninstall()
    assert fake.forward is theirs and fake.Base().run(1) == ("ours", ("base", 1))
    fake.forward = ours
    installation.uninstall()
    assert fake.forward(1) == ("stock", 1, 1) and fake.Base().run(1) == ("base", 1)


def test_importing_the_hooks_package_imports_no_megatron():
    code = "import sys, megatron_memo.hooks.seams, megatron_memo.hooks.allowlist; print('megatron' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_the_installed_megatrons_layer_can_be_hooked_and_restored():
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer", exc_type=ImportError)
    from megatron.core import tensor_parallel

    assert (seams.megatron_root() / "megatron" / "core" / "__init__.py").is_file()
    assert seams.megatron_version().split(".")[0].isdigit()
    target = "megatron.core.transformer.transformer_layer:TransformerLayer.forward"
    # checkpoint is re-exported by tensor_parallel/__init__.py: a real alias.
    hooks = [
        Hook(target, marked, "the test wants it", ("self", "hidden_states", "attention_mask")),
        Hook("megatron.core.tensor_parallel.random:checkpoint", marked, "the test wants it", ("function", "distribute_saved_activations")),
    ]
    before, checkpoint = vars(layer.TransformerLayer)["forward"], tensor_parallel.checkpoint
    installation = install(hooks)
    assert vars(layer.TransformerLayer)["forward"] is not before and tensor_parallel.checkpoint is not checkpoint
    assert "megatron.core.tensor_parallel.checkpoint" in installation.names
    installation.uninstall()
    assert vars(layer.TransformerLayer)["forward"] is before and tensor_parallel.checkpoint is checkpoint
    with pytest.raises(SeamError, match=re.escape(seams.megatron_version())):
        install([Hook(target, marked, "the test wants it", ("self", "inputs"))])
