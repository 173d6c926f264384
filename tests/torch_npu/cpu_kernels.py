"""Let the CPU compute torch_npu's operators: the stand-in CANN has no kernels.

Importing this, after torch_npu, replaces every operator that torch_npu implements by
one that copies its inputs to the host, computes there, and copies back.  Memory,
copies, streams and devices stay torch_npu's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch_npu  # noqa: F401

# Operators that allocate, view or copy: torch_npu's own work over the stand-in.
KEPT = frozenset(
    """
    _copy_from _copy_from_and_resize _has_compatible_shallow_copy_type
    _local_scalar_dense _pin_memory _reshape_alias _to_copy alias as_strided copy_ empty
    empty_like empty_strided is_pinned is_set_to new_empty record_stream resize_ set_
    unfold view view_as_complex view_as_real
    """.split()
)


def on_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """See all elements under a tensor as a flat one: that copies without kernels."""
    storage = tensor.untyped_storage()
    elements = storage.nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (elements,), (1,))


def strided_like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.cpu()
    return strided_like(whole_storage(tensor).cpu(), tensor)


def write_back(target: torch.Tensor, computed: torch.Tensor) -> None:
    computed = computed.to(target.dtype).expand(target.shape)
    if target.is_contiguous():
        plain_copy(target, computed.contiguous())
        return
    flat = whole_storage(target)
    host = flat.cpu()
    strided_like(host, target).copy_(computed)
    plain_copy(flat, host)


original_copy = torch.library.get_kernel("aten::copy_", "PrivateUse1")
npu_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Let torch_npu copy what needs no kernel: equal shapes and types, contiguous."""
    original_copy.call_boxed(npu_keys, target, source, False)


def copy_(
    self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    same = self.shape == source.shape and self.dtype == source.dtype
    if same and self.is_contiguous() and source.is_contiguous():
        original_copy.call_boxed(npu_keys, self, source, non_blocking)
    elif on_npu(self):
        write_back(self, to_host(source) if on_npu(source) else source)
    else:
        self.copy_(to_host(source))
    return self


def computed_on_cpu(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Wrap an operator so that it runs on the host; what it writes is written back."""
    arguments = op._schema.arguments
    written = [
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = [*pytree.tree_leaves(args), *pytree.tree_leaves(kwargs)]
        device = next((value.device for value in values if on_npu(value)), None)
        host_args, host_kwargs = pytree.tree_map(
            lambda value: to_host(value) if on_npu(value) else value, (args, kwargs)
        )
        if kwargs.get("device") is not None:
            device, host_kwargs["device"] = torch.device(kwargs["device"]), "cpu"
        result = op(*host_args, **host_kwargs)
        originals = {}
        for position, name in written:
            given = args[position] if position < len(args) else kwargs.get(name)
            host = (
                host_args[position] if position < len(args) else host_kwargs.get(name)
            )
            for target, computed in zip(
                pytree.tree_leaves(given), pytree.tree_leaves(host), strict=True
            ):
                if on_npu(target):
                    if target.shape != computed.shape:
                        target.resize_(computed.shape)
                    write_back(target, computed)
                    originals[id(computed)] = target

        def to_device(value: Any) -> Any:
            if device is None or not isinstance(value, torch.Tensor):
                return value
            if id(value) in originals:
                return originals[id(value)]
            return value.contiguous().to(device)

        return pytree.tree_map(to_device, result)

    return kernel


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    host_bias = None if bias is None else to_host(bias)
    return torch.convolution(to_host(x), to_host(weight), host_bias, *rest).to(x.device)


def clone(x: torch.Tensor, memory_format: Any = None) -> Any:
    return to_host(x).contiguous().to(x.device)


def contiguous(
    x: torch.Tensor, memory_format: torch.memory_format | None = None
) -> Any:
    return x if x.is_contiguous() else clone(x)


def install() -> torch.library.Library:
    """Replace the operators; they stay replaced as long as the result is alive."""
    library = torch.library.Library("aten", "IMPL")

    def replace(name: Any, kernel: Callable[..., Any]) -> None:
        library.impl(name, kernel, "PrivateUse1", allow_override=True)

    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        if namespace != "aten" or name in KEPT:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "PrivateUse1"):
            continue
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, overload or "default", None)
        if op is not None:  # Some of torch_npu's own are not published to Python.
            replace(op, computed_on_cpu(op))
    replace("convolution_overrideable", convolution)
    replace("copy_", copy_)
    replace("clone", clone)
    replace("contiguous", contiguous)
    return library


installed = install()
