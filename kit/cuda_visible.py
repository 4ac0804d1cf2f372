"""Which GPUs `CUDA_VISIBLE_DEVICES` lets processes use, as CUDA reads it.

NVIDIA does not write its rules down in full. These are what PyTorch takes them for (torch.cuda,
`_parse_visible_devices`), and of instances what the MIG User Guide says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible(entries: str | None, gpus: list[tuple[str, list[str] | None]]) -> list[str]:
    """UUIDs that `CUDA_VISIBLE_DEVICES` lets processes use, as CUDA reads it, in its order.

    The first entry says whether all are indices, `GPU-…` or `MIG-…`, whole or as far as they are unique.
    One that fits nothing, or several, hides what follows it; one named twice hides all. CUDA gives one
    process a single MIG instance and no whole GPU beside it; here are all that its processes may share.

    Args:
        entries: its value, None when it is not set.
        gpus: (UUID, UUIDs of its MIG instances, None where MIG is off) of every GPU, in order.
    """
    parts = {gpu: [gpu] if cut is None else cut for gpu, cut in gpus}
    if entries is None:
        return [uuid for of_one in parts.values() for uuid in of_one]
    kind = next((k for k in ("GPU-", "MIG-") if entries.startswith(k)), "")
    names = [uuid for of_one in parts.values() for uuid in of_one] if kind == "MIG-" else [*parts]
    found: list[str] = []
    for entry in entries.split(","):
        if kind:
            fits = [name for name in names if entry.startswith(kind) and name.startswith(entry)]
        else:
            fits = names[_index(entry) :][:1] if _index(entry) >= 0 else []
        if len(fits) != 1:
            break
        if fits[0] in found:
            return []
        found += fits
    return [uuid for name in found for uuid in parts.get(name, [name])]


def _index(entry: str) -> int:
    """As C reads it: `2x` is 2; −1 for what is none."""
    text = entry.strip().removeprefix("+")
    digits = text[: next((k for k, c in enumerate(text) if not c.isdecimal()), len(text))]
    return int(digits) if digits else -1


def uncertain(environment: Mapping[str, str], models: Sequence[str]) -> str:
    """Why indices may mean other GPUs than `visible` takes them for; empty where they cannot.

    Args:
        environment: what the variables are.
        models: names of all GPUs.
    """
    entries = environment.get("CUDA_VISIBLE_DEVICES", "")
    in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if in_order or len(set(models)) < 2 or _index(entries) < 0:
        return ""
    return (
        f"CUDA counts GPUs by speed, NVML by bus, and they differ ({', '.join(sorted(set(models)))}): "
        f"CUDA_VISIBLE_DEVICES = {entries!r} may mean others than are read; name UUIDs instead, or set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
