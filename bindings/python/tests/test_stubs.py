"""The stubs for type checkers are those of the native module, and everything has a docstring."""

import ast
import importlib.resources
import inspect

import kvik
from kvik import _kvik

STUBS = ast.parse(importlib.resources.files("kvik").joinpath("_kvik.pyi").read_text())
CLASSES = {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}
# Types that exist for type checkers only.
TYPES_ALONE = {"DlpackArray", "StoreStats"}


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_classes_and_their_methods_are_those_of_the_stubs():
    native = {name for name, value in vars(_kvik).items() if inspect.isclass(value)}
    assert set(CLASSES) - TYPES_ALONE == native
    assert set(kvik.__all__) == native | {"__version__"}
    for name in native:
        stubs = {node.name for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)}
        assert public(vars(getattr(kvik, name))) - {"args"} == public(stubs), name


def test_arguments_have_the_names_of_the_stubs():
    for name, node in CLASSES.items():
        methods = [] if name in TYPES_ALONE else [item for item in node.body if isinstance(item, ast.FunctionDef)]
        for method in methods:
            native = getattr(getattr(kvik, name), method.name)
            is_property = any(isinstance(item, ast.Name) and item.id == "property" for item in method.decorator_list)
            if method.name.startswith("__") or is_property:
                continue
            arguments = method.args
            expected = [argument.arg for argument in arguments.args + arguments.kwonlyargs if argument.arg != "self"]
            actual = [argument for argument in inspect.signature(native).parameters if argument != "self"]
            assert actual == expected, f"{name}.{method.name}"


def test_every_class_and_public_method_has_a_docstring():
    missing = []
    for name in set(kvik.__all__) - {"__version__"}:
        kind = getattr(kvik, name)
        missing += [name] * (not kind.__doc__)
        for method in public(vars(kind)):
            missing += [f"{name}.{method}"] * (not getattr(kind, method).__doc__)
    assert not missing
