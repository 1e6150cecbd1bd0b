"""State that a trial run of a user's model must leave as it was.

The check of rows (`rows.py`) runs the model more often than training does. Everything that the model's code changed
meanwhile is put back: what its modules hold, what its functions reach by name (globals, closures, class attributes,
defaults), generators of random numbers, and every tensor that was written to. Users' hooks are not called at all.

What cannot be put back, such as a generator function or an open file, is taken away instead: a model that asks for it
ends its trial with an error, before anything has changed.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import operator
import random
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.params import local_of
from fourfold.wrap.grid_tensor import CutTensor

# tensors


class UndoneWrites(TorchDispatchMode):
    """Keeps a copy of the memory of every tensor before the first write to it, and puts it back at the end.

    Only memory from before the block is copied, and only if it is written to: a model's weights are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        """The storages made inside the block. A storage from before keeps its number as long as it lives."""
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Storages that were written to, and their copies."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch would run no compiled code inside of another mode, nor afterwards

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in storages_in((args, kwargs))}
        for storage in storages_in(written_by(func, args, kwargs)):
            if storage._cdata not in self._made and storage._cdata not in self._kept:
                self._kept[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        self._made |= {storage._cdata for storage in storages_in(result)} - given
        return result

    def undo(self) -> None:
        """Put back what was there before the block. Autograd counts no change, because none is left."""
        for storage, before in self._kept.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)


def storages_in(values: Any) -> list[torch.UntypedStorage]:
    """Return the memory of the tensors among nested values."""
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, CutTensor)]
    tensors = [local_of(leaf) if isinstance(leaf, DTensor) else leaf for leaf in found]
    return [t.untyped_storage() for t in tensors if t.layout is torch.strided and not t.is_meta]


def written_by(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments that an operation of torch changes in place."""
    written = _written_arguments(func)
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in written]


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operation changes in place."""
    arguments = func._schema.arguments
    return [(at, each.name) for at, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]


class UndoneData(TorchFunctionMode):
    """Puts back the memory of tensors after `tensor.data = other`, which gives them another and is not dispatched."""

    SET: ClassVar[Any] = Tensor.data.__set__  # type: ignore[missing-attribute]

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self.SET and type(args[0]) in (Tensor, nn.Parameter):
            self._before.setdefault(id(args[0]), (args[0], args[0].data))
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        for tensor, before in self._before.values():
            tensor.data = before


# Python

PLAIN = (int, float, complex, bool, str, bytes, range, slice, type(None), type(...), type(NotImplemented))
"""Types of values that nothing can change."""
LIBRARIES = {"torch", "fourfold", "numpy"} | (sys.stdlib_module_names - {"argparse", "collections", "types"})
"""Packages with objects that hold nothing that a second forward would notice, or that other threads may change."""
CONTAINERS = (dict, list, set, deque, bytearray)
QUEUES = {"queue", "_queue", "multiprocessing", "socket", "sqlite3", "_csv"}
"""Packages with objects that hand things on to others."""
COPIED = (*(type(iter(empty)) for empty in ([], (), range(0), "", {}, set())), itertools.count)
"""Iterators with a copy that goes on by itself. Others may share what they iterate over with their copies."""
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with its hooks, and, after `_global`, torch's tables of hooks for all modules."""
HOOKS_THAT_COMPUTE = {"torch", "fourfold", "transformers", "peft", "accelerate"}
"""Packages with hooks that are part of what a module computes, such as `weight_norm`."""
INSIDE = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
}
"""The attributes by which functions hold others."""
GENERATORS = (
    *("torch._C.Generator", "random.Random"),
    *("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"),
)
"""The classes of generators of random numbers, by name, because numpy may not be there."""


class Untouched:
    """What a model's code can reach and change, apart from tensors, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, object] = {}
        """Everything that was looked at, by `id`; kept, because another object could get the same `id`."""
        self._restores: list[Callable[[], None]] = []
        self._generators: list[Any] = []
        """Generators of random numbers."""
        self._left: list[Any] = []
        """Values that are still to be looked at. A list, because values may be nested deeper than Python calls."""
        self._taken: list[tuple[Callable[[Any], None], Any]] = []
        """What is replaced during the trial: how to set it, and the substitute."""
        self._muted: list[tuple[dict, Any]] = []
        """The hooks that are not called: the table that holds them, and the key."""
        for name in HOOKS:
            self._hooks(vars(torch_module)[f"_global{name}"])
        self._left.append(model)
        while self._left:
            self._look_at(self._left.pop())
        for table, key in self._muted:
            del table[key]
        for put, substitute in self._taken:
            put(substitute)

    def leaves_out_hooks(self) -> bool:
        """Return whether hooks on forward passes are not called, which could have changed results."""
        modules = [vars(each) for each in self._known.values() if isinstance(each, nn.Module)]
        tables = [vars(torch_module)[f"_global{name}"] for name in FORWARD_HOOKS]
        tables += [module[name] for module in modules for name in FORWARD_HOOKS]
        return any(table is other for table, _ in self._muted for other in tables)

    def restore(self) -> None:
        """Put everything back."""
        for restore in self._restores:
            restore()

    def drawn(self) -> list[str]:
        """Return the states of the model's own generators of random numbers, in a form that can be compared."""
        states = map(_generator_state, self._generators)
        return [repr(state.tolist() if isinstance(state, Tensor) else state) for state in states]

    def draw_others(self) -> None:
        """Let the model's own generators draw other numbers than before, until everything is put back."""
        for generator in self._generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(generator.initial_seed() + 1)
            else:
                generator.random()

    def _look_at(self, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self._known:
            return
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(value)
        else:
            self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if _full_name(type(value)) in GENERATORS:
            self._generator(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif kind := next((kind for kind in INSIDE if isinstance(value, kind)), None):
            self._left += [getattr(value, name) for name in INSIDE[kind]]
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (tuple, frozenset)):
            self._left += value
        elif isinstance(value, CONTAINERS):
            self._container(value)
        elif _full_name(type(value)) == "numpy.ndarray":
            self._array(value)
        self._object(value)

    def _tensor(self, tensor: Tensor) -> None:
        """Note the gradient of a tensor that the model's code may train by itself."""
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_leaf and tensor.requires_grad:
            self._restores.append(functools.partial(setattr, tensor, "grad", tensor.grad))

    def _object(self, value: Any) -> None:
        """Note the attributes of a module, or of an object of a user's class."""
        kind = type(value)
        if isinstance(value, nn.Module):
            for name in HOOKS:
                self._hooks(vars(value).get(name, {}))
        elif isinstance(value, (type, types.ModuleType, types.FunctionType)) or (
            _package(kind) in LIBRARIES and not isinstance(value, torch.optim.Optimizer)
        ):
            return
        self._left.append(kind)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._left.append(vars(value))
        for name in [name for each in kind.__mro__ for name in _slots_of(each)]:
            if hasattr(value, name):
                self._attribute(value, name, getattr(value, name))

    def _attribute(self, owner: Any, name: str, value: Any) -> None:
        self._replaceable(functools.partial(object.__setattr__, owner, name), value)

        def put_back() -> None:
            if getattr(owner, name, owner) is not value:
                object.__setattr__(owner, name, value)

        self._restores.append(put_back)

    def _container(self, container: Any) -> None:
        before = container.copy()

        def refill() -> None:
            if not _holds(container, before):
                container.clear()  # the object itself stays, because others may hold it
                (container.extend if isinstance(container, (list, deque, bytearray)) else container.update)(before)

        self._restores.append(refill)
        if isinstance(container, set):
            self._left += container
        elif isinstance(container, dict) or not set(map(type, container)) <= set(PLAIN):  # a list may be long
            for key, entry in list(container.items() if isinstance(container, dict) else enumerate(container)):
                self._replaceable(functools.partial(operator.setitem, container, key), entry)

    def _replaceable(self, put: Callable[[Any], None], value: Any) -> None:
        """Look at a value that can be replaced where it stands, which an iterator is for the time of the trial."""
        if isinstance(value, types.MethodWrapperType) and isinstance(value.__self__, COPIED):
            self._taken.append((put, getattr(_copied(value.__self__), value.__name__)))  # `itertools.count().__next__`
        elif isinstance(value, COPIED):
            self._taken.append((put, _copied(value)))
        elif isinstance(value, functools._lru_cache_wrapper):
            self._left.append(value.__wrapped__)
            self._taken.append((put, value.__wrapped__))  # the cache keeps nothing of the trial
        elif _is_used_up(value):
            self._taken.append((put, Taken(value)))
        else:
            self._left.append(value)

    def _array(self, array: Any) -> None:
        if array.flags.writeable:
            before = array.copy()
            self._restores.append(functools.partial(operator.setitem, array, ..., before))

    def _generator(self, generator: Any) -> None:
        self._generators.append(generator)
        state = _generator_state(generator)
        self._restores.append(functools.partial(_set_generator, generator, state))

    def _class(self, kind: type) -> None:
        """Note the attributes of a user's class and of its parents."""
        for each in kind.__mro__:
            if not _is_own_code(each.__module__) or (each is not kind and id(each) in self._known):
                continue
            self._known[id(each)] = each
            before = {name: value for name, value in vars(each).items() if not _is_internal(name)}
            for name, value in before.items():
                self._replaceable(functools.partial(setattr, each, name), value)
            self._restores.append(functools.partial(_restore_class, each, before))

    def _function(self, function: types.FunctionType) -> None:
        """Note what a user's function reaches: its closure, defaults, attributes, and globals by name."""
        # a decorator of a library's, such as `torch.no_grad()`, passes for a function of the user's module
        own_globals = _is_own_code(function.__globals__.get("__name__"))
        if not own_globals and not _is_own_code(function.__module__):
            return
        self._left += [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            if _is_filled(cell):
                self._cell(cell)
        if not own_globals:
            return
        names = set(_names_in(function.__code__))
        self._globals(function.__globals__, names)
        for name in names:
            if isinstance(found := function.__globals__.get(name), types.ModuleType) and _is_own_code(found.__name__):
                self._globals(vars(found), names)

    def _cell(self, cell: types.CellType) -> None:
        if id(cell) in self._known:
            return
        self._known[id(cell)] = cell
        value = cell.cell_contents
        self._replaceable(functools.partial(setattr, cell, "cell_contents"), value)
        self._restores.append(functools.partial(setattr, cell, "cell_contents", value))

    def _globals(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        before = {name: namespace[name] for name in names if name in namespace}
        for name, value in before.items():
            if not isinstance(value, types.ModuleType):
                self._replaceable(functools.partial(operator.setitem, namespace, name), value)

        def put_back() -> None:
            for name in names:
                if name not in before:
                    namespace.pop(name, None)
                elif namespace.get(name) is not before[name]:
                    namespace[name] = before[name]

        self._restores.append(put_back)

    def _hooks(self, table: dict[int, Any]) -> None:
        """Note the hooks of a table, and those that the trial does not call."""
        self._left.append(table)
        self._muted += [(table, key) for key, hook in table.items() if _package(hook) not in HOOKS_THAT_COMPUTE]


def _copied(iterator: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of `itertools`, from Python 3.12 on
        return copy.copy(iterator)


def _is_used_up(value: Any) -> bool:
    """Return whether using a value leaves a trace that cannot be removed: a file, a queue, or some iterators."""
    if _package(type(value)) in QUEUES:
        return True
    iterates = hasattr(type(value), "__next__")
    of_user = hasattr(value, "__dict__") and _package(type(value)) not in LIBRARIES
    return isinstance(value, io.IOBase) or (iterates and not of_user)


class Taken:
    """Stands, during a trial, for an object that could not be put back to where it was."""

    def __init__(self, value: object) -> None:
        self._kind = type(value).__name__

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"it uses a {self._kind}, which cannot be used a second time without a trace")

    def __iter__(self) -> NoReturn:
        self.__getattr__("__iter__")

    def __next__(self) -> NoReturn:
        self.__getattr__("__next__")


def _holds(container: Any, before: Any) -> bool:
    """Return whether a container has the same entries as before, which are not compared but by identity."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return _all_same(container, before) and _all_same(container.values(), before.values())
    return container == before if isinstance(container, (set, bytearray)) else _all_same(container, before)


def _all_same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(map(operator.is_, left, right))


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in before and not _is_internal(name)]:
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator of random numbers: of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)  # what numpy's newer generators draw bits from
    return generator.get_state() if bits is None else bits.state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _is_internal(name: str) -> bool:
    """Return whether a name is one of Python's own, such as `__dict__`, and no method such as `__call__`."""
    return name in ("__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "__doc__", "__slots__")


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and the functions inside it read from their globals or from objects."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _names_in(inside)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True


def _package(value: Any) -> str:
    """Return the package in which a class, a function or the class of another object was written."""
    while isinstance(value, functools.partial):
        value = value.func
    return (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]


@functools.cache
def _is_own_code(module: str | None) -> bool:
    """Return whether a Python module is the user's own code: not installed, and no part of Python."""
    package = (module or "builtins").partition(".")[0]
    if package in ("torch", "fourfold") or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not file.startswith(tuple(installed))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def untouched(model: nn.Module) -> Iterator[Untouched]:
    """Put back, at the end, everything that the model's code changed."""
    python, writes, data = Untouched(model), UndoneWrites(), UndoneData()
    try:
        with writes, data:
            yield python
    finally:
        data.undo()
        writes.undo()
        python.restore()
