"""The torch device `sim`: ordinary torch code runs on it, and every operation waits in the current stream's queue.

Operations that need values on the host make it wait for the current stream, and are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.device.memory import Allocation, Block, DeviceMemory, extent, poison
from tests.device.races import Touch
from tests.device.streams import QueuedStream

SIM = torch.device("privateuseone", 0)
"""Named `sim` after `register`."""
aten = torch.ops.aten

_UNREAD = "_like", "new_"
"""In names of operations that look at a tensor's shape alone."""
_UNWRITTEN = aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default
_INDEXING = aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default
_HOST_MADE = "arange", "arange.start", "arange.start_step", "eye", "eye.m", "tril_indices", "triu_indices"
"""Operations whose results the host knows."""


class DeviceTensor(torch.Tensor):
    """A tensor on `sim`. `stored` lies on the host and is touched by queued work alone."""

    stored: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, stored: torch.Tensor, block: Block) -> DeviceTensor:
        layout = {"strides": stored.stride(), "storage_offset": stored.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=SIM, **layout)
        made.stored = stored
        made.block = block
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """As torch's, which does not take tensors made in Python."""
        return self.cpu().tolist()

    def touch(self, *, writes: bool) -> Touch:
        """What an operation does to it."""
        return Touch(self.block.allocation.memory, writes, *extent(self.stored))

    def record_stream(self, stream: QueuedStream) -> None:
        """As torch's: the memory is not used anew before that stream's work so far is done."""
        self.block.allocation.users.append(stream)


# ------------------------------------------------------------------------------------------------------- operations


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queue one operation, or answer at once where no values are needed."""
    device = DeviceMemory.now
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)  # in inference mode torch does not
    if func is aten.copy_.default:
        return _copy(device, *args, **kwargs)
    if func is aten._to_copy.default and kwargs.get("device", SIM) == torch.device("cpu"):
        return _to_host(device, args[0], **kwargs)
    if func.is_view or func is aten._unsafe_view.default:
        return _view(func, args, kwargs)
    if func in _INDEXING:
        return _index(device, func, args, kwargs)
    if _answers_the_host(func):
        return _wait(device, func, args, kwargs)
    return _queue(device, func, args, kwargs)


def _answers_the_host(func: Any) -> bool:
    """True if the host must know the result, or its shape."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    owner = next(each for each in _tensors(args) if isinstance(each, DeviceTensor))
    seen = func(*on_host(args), **on_host(kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda tensor: DeviceTensor(tensor, owner.block), seen)


def _index(device: DeviceMemory, func: Any, args: Any, kwargs: Any) -> Any:
    """Indices may lie on the host, which waits for their copy. It waits for the number of those in a mask too."""
    tensor, indices, *rest = args
    if not isinstance(tensor, DeviceTensor):
        raise RuntimeError(f"{func.name()} takes indices on the device of a tensor on {tensor.device}.")
    indices = [index if index is None else index.to(SIM) for index in indices]
    if all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices):
        return _queue(device, func, (tensor, indices, *rest), kwargs)
    if func is aten.index.Tensor:
        return _wait(device, func, (tensor, indices), kwargs)
    device.finish(func.name())
    return _queue(device, func, (tensor, indices, *rest), kwargs)


def _wait(device: DeviceMemory, func: Any, args: Any, kwargs: Any) -> Any:
    """Have the host wait for a result."""
    reads, _ = _operands(func, args, kwargs)
    inside = on_host((args, kwargs))
    found: list[Any] = []

    def work() -> None:
        found.append(func(*inside[0], **inside[1]))

    device.queues.current.issue(func.name(), work, [each.touch(writes=False) for each in reads])
    device.finish(func.name())
    return pytree.tree_map_only(torch.Tensor, lambda tensor: _launched(device, func.name(), tensor), found[0])


def _queue(device: DeviceMemory, func: Any, args: Any, kwargs: Any) -> Any:
    """Queue the work on what it writes, or on results whose shapes torch's meta device knows."""
    reads, writes = _operands(func, args, kwargs)
    touches = [each.touch(writes=False) for each in reads] + [each.touch(writes=True) for each in writes]
    inside, inside_kwargs = on_host((args, kwargs))
    if writes:
        device.queues.current.issue(func.name(), lambda: func(*inside, **inside_kwargs), touches)
        answers = len(func._schema.returns)
        return None if not answers else writes[0] if answers == 1 else tuple(writes)
    on_meta, on_meta_kwargs = _mapped((args, kwargs), _meta, torch.device("meta"))
    shapes = func(*on_meta, **on_meta_kwargs)
    made = pytree.tree_map_only(torch.Tensor, partial(_allocated, device), shapes)
    if func in _UNWRITTEN:
        return made
    places = list(_tensors(made))
    hosts = [each.stored for each in places]

    def work() -> None:
        for host, tensor in zip(hosts, _tensors(func(*inside, **inside_kwargs)), strict=True):
            host.copy_(tensor)

    device.queues.current.issue(func.name(), work, touches + [each.touch(writes=True) for each in places])
    return made


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[DeviceTensor], list[DeviceTensor]]:
    """Tensors that an operation reads, and those that it writes."""
    by_name = {argument.name: argument for argument in func._schema.arguments}
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(by_name[name], value) for name, value in kwargs.items()]
    reads: list[DeviceTensor] = []
    writes: list[DeviceTensor] = []
    for argument, value in given:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in _tensors(value):
            if isinstance(leaf, DeviceTensor):
                (writes if written else reads).append(leaf)
            elif leaf.ndim or written:
                raise RuntimeError(f"{func.name()} mixes tensors on sim with {tuple(leaf.shape)} on {leaf.device}.")
    unread = any(mark in func.name() for mark in _UNREAD)
    return [] if unread else reads, writes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


# ----------------------------------------------------------------------------------------------------------- copies


def _copy(device: DeviceMemory, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on_device = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
    touches = [_touch(device, target, writes=True), _touch(device, source, writes=False)]
    if non_blocking and not all(on_device):
        _check_link(target, source, touches)
    if not on_device[0] and touches[0] is not None:
        poison(target)  # until the copy is over, nobody knows what stands there
    work = partial(_stored(target).copy_, _stored(source))
    device.queues.current.issue("copy", work, filter(None, touches))
    if not non_blocking and not all(on_device):
        device.finish("aten::copy_")
    return target


def _check_link(target: torch.Tensor, source: torch.Tensor, touches: list[Touch | None]) -> None:
    """Raise unless a copy over the link can leave the host free."""
    if target.numel() and None in touches:
        raise RuntimeError("a copy from or to memory that is not pinned makes the host wait.")
    rows = target.is_contiguous() and source.is_contiguous()
    if not rows or target.dtype is not source.dtype or target.shape != source.shape:
        raise RuntimeError("a copy that is not of one row of bytes to another goes through memory that is not pinned.")


def _to_host(
    memory: DeviceMemory, source: DeviceTensor, *, dtype: Any = None, non_blocking: bool = False, **_: Any
) -> torch.Tensor:
    if non_blocking:
        raise RuntimeError("a tensor is read by the host that does not wait; copy it to pinned memory.")
    found = torch.empty(source.shape, dtype=dtype or source.dtype)
    memory.queues.current.issue("copy", partial(found.copy_, source.stored), [source.touch(writes=False)])
    memory.finish("aten::_to_copy")
    return found


def _touch(device: DeviceMemory, tensor: torch.Tensor, *, writes: bool) -> Touch | None:
    if isinstance(tensor, DeviceTensor):
        return tensor.touch(writes=writes)
    return device.touch_pinned(tensor, writes=writes)


# -------------------------------------------------------------------------------------------- tensors on `sim` and host


def _allocated(device: DeviceMemory, like: torch.Tensor) -> DeviceTensor:
    host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return DeviceTensor(host, Block(Allocation(device, host)))


def _launched(device: DeviceMemory, label: str, values: torch.Tensor) -> DeviceTensor:
    """A tensor of values that the host knows."""
    made = _allocated(device, values)
    device.queues.current.issue(label, partial(made.stored.copy_, values), [made.touch(writes=True)])
    return made


def on_host(tree: Any) -> Any:
    """The same arguments with tensors and devices of the host."""
    return _mapped(tree, _stored, torch.device("cpu"))


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.stored if isinstance(tensor, DeviceTensor) else tensor


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _mapped(tree: Any, of: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    if isinstance(tree, DeviceTensor):
        return of(tree)
    if isinstance(tree, torch.Tensor):
        return tree.clone()  # a number goes with the launch
    if isinstance(tree, torch.device) and tree.type == SIM.type:
        return device
    if isinstance(tree, tuple | list):
        return type(tree)([_mapped(each, of, device) for each in tree])
    if isinstance(tree, dict):
        return {name: _mapped(each, of, device) for name, each in tree.items()}
    return tree


# ---------------------------------------------------------------------------------------------------- for all of torch


class _Absent(torch.utils.backend_registration._DummyBackendModule):
    """What tells the rest of torch that there is no accelerator to look after."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


class _AbsentHook(torch.utils.backend_registration._DummyPrivateUse1Hook):
    """The same, for torch's C++."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return False


@functools.cache
def register() -> list[torch.library.Library]:
    """Make `sim` a device of torch, for the rest of the process."""
    module = _Absent()
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("sim", module, _AbsentHook())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_from_nothing, "PrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    some.impl("_copy_from", _copied_from, "PrivateUse1")
    for name in _HOST_MADE:
        packet, _, overload = name.partition(".")
        some.impl(name, partial(_made_by_host, getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    return [everything, some]


def _from_nothing(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations without a tensor among their arguments, to begin with those that allocate."""
    if func in (aten.empty.memory_format, aten.empty_strided.default):
        return _allocated(DeviceMemory.now, func(*args, **kwargs | {"device": torch.device("meta")}))
    return dispatch(func, args, kwargs)


def _copied_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The copy of `torch.tensor(..., device="sim")`, in which no tensor's own dispatch is asked."""
    return _copy(DeviceMemory.now, target, source, non_blocking)


def _made_by_host(func: Any, *args: Any, **kwargs: Any) -> DeviceTensor:
    values = func(*args, **kwargs | {"device": torch.device("cpu")})
    return _launched(DeviceMemory.now, func.name(), values)
