#!/usr/bin/env python3
"""The tree is the dependency order: a folder includes only folders above it, and so do the rooms of a folder.

Reads every #include of src/, include/, python/, examples/, bench/ and tests/. A public header belongs to the
layer that implements it (HEADERS). libtorch headers appear only below the bar (LIBTORCH_FOLDERS).
Prints one line per violation; the exit code is then 1.
"""

import pathlib
import sys

import tree

# A folder of src/ may include itself and what stands before it, except what NOT_FOR_EACH_OTHER forbids.
LAYERS = ["base", "layout", "io", "value", "format", "storage", "comm", "checkpoint", "cli",
          "same_host", "torch", "optim", "fsdp", "optim_state", "checkpointer"]
BAR = LAYERS.index("torch")  # from here on libtorch is allowed
# The rooms of a folder: each includes itself, the rooms before it and what stands beside the rooms.
ROOMS = {
    "format": ["pickle", "zip", "torch", "safetensors", "gguf", "exported", "dcp", "sharded", "olmo"],
    "storage": ["memory", "posix", "arena", "cache", "http", "s3", "hub"],
    "torch": ["test_device"],
    "checkpoint": ["read", "dcp", "open", "load", "save", "write", "together", "check", "run", "background"],
    "fsdp": ["plan", "unit", "step", "deferred", "wrap", "modules", "state", "testing"],
}

# Every format works on every store because neither knows the other; nothing builds on the command.
NOT_FOR_EACH_OTHER = {("storage", "format"), ("comm", "format"), ("comm", "storage")}
NOBODY_INCLUDES = {"cli"}

# The layer of each public header, or folder of them.
HEADERS = {
    "error.h": "base", "job.h": "base", "library.h": "base",
    "layout.h": "layout",
    "io.h": "io",
    "leaf.h": "value", "numpy_array.h": "value", "tensor_view.h": "value", "value.h": "value",
    "location.h": "storage", "storage.h": "storage", "stores.h": "storage",
    "comm.h": "comm",
    "checkpoint.h": "checkpoint", "checkpoint_writer.h": "checkpoint", "save_frequency.h": "checkpoint", "convert.h": "checkpoint", "copy.h": "checkpoint", "grace.h": "checkpoint",
    "data_files.h": "checkpoint", "load_options.h": "checkpoint", "mapped.h": "checkpoint", "open_options.h": "checkpoint",
    "restore.h": "checkpoint", "run_directory.h": "checkpoint", "run_lease.h": "checkpoint",
    "save_options.h": "checkpoint", "stateful.h": "checkpoint", "stats.h": "checkpoint", "verify.h": "checkpoint",
    "collectives.h": "torch", "distributed_sampler.h": "torch", "mesh.h": "torch", "parameter.h": "torch",
    "tensor_value.h": "torch",
    "grad_scaler.h": "optim", "lr_scheduler.h": "optim", "norms.h": "optim", "optim.h": "optim",
    "optimizer_ref.h": "optim",
    "activation_checkpoint.h": "fsdp", "calls.h": "fsdp", "ddp.h": "fsdp", "deferred_init.h": "fsdp", "detail": "fsdp",
    "fsdp.h": "fsdp", "optimizer_in_backward.h": "fsdp", "pytorch/fully_sharded_data_parallel.h": "fsdp",
    "pytorch/state_dict.h": "fsdp", "pytorch/wrap_scope.h": "fsdp", "shard_options.h": "fsdp",
    "sync_batchnorm.h": "fsdp", "trace.h": "fsdp", "unit_controls.h": "fsdp",
    "pytorch/distributed_state_dict.h": "optim_state", "pytorch/optim_state_dict.h": "optim_state",
    "snapshot.h": "optim_state", "tessera.h": "optim_state", "training_state.h": "optim_state",
    "training_writer.h": "optim_state",
    "checkpointer.h": "checkpointer",
}

LIBTORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/", "gloo/")
LIBTORCH_FOLDERS = ("src/torch/", "src/optim/", "src/fsdp/", "src/optim_state/", "src/checkpointer/", "examples/", "bench/",
                    "tests/")
# Programs that a user could have written: they see the public headers alone.
PUBLIC_ONLY = ("examples/", "python/")


def layer_of(path):
    """The layer of a file of ours, or None where no layer holds (tests, examples, bench)."""
    parts = pathlib.PurePosixPath(path).parts
    if parts[:2] == ("include", "tessera"):
        return HEADERS.get("/".join(parts[2:]), HEADERS.get(parts[2]))
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return None


def target_of(included):
    """The path of a quoted include relative to the checkout, as our include directories resolve it."""
    return f"include/{included}" if included.startswith("tessera/") else f"src/{included}"


def is_libtorch(angled, included):
    return angled and included.startswith(LIBTORCH_PREFIXES)


def check_layers(here, there):
    if there in NOBODY_INCLUDES and here != there:
        return f"nothing may include {there}"
    if (here, there) in NOT_FOR_EACH_OTHER:
        return f"{here} and {there} do not know each other"
    if LAYERS.index(there) > LAYERS.index(here):
        return f"{here} is above {there} in the tree"
    return None


def room_of(path):
    """The folder of src/ and the room in it that a path below src/ lies in; a room of None: beside the rooms."""
    parts = pathlib.PurePosixPath(path).parts
    return parts[0], parts[1] if len(parts) > 2 else None


def check_rooms(path, included):
    """Inside a folder of src/ that has rooms. Tests may use any room of their folder."""
    if not path.startswith("src/") or path.endswith("_test.cpp"):
        return None
    folder, here = room_of(path.removeprefix("src/"))
    there_folder, there = room_of(included)
    if folder != there_folder or folder not in ROOMS or here is None or there is None:
        return None
    rooms = ROOMS[folder]
    if {here, there} <= set(rooms) and rooms.index(there) > rooms.index(here):
        return f"room {here} of {folder} is above room {there}"
    return None


def check_include(path, angled, included):
    """The reason why `path` may not include this, or None."""
    here = layer_of(path)
    if is_libtorch(angled, included):
        below = path.startswith(LIBTORCH_FOLDERS) or (here in LAYERS and LAYERS.index(here) >= BAR)
        return None if below else "libtorch above the bar"
    if angled or "/" not in included:
        return None
    target = target_of(included)
    if path.startswith(PUBLIC_ONLY) and not target.startswith("include/"):
        return f"{path.split('/')[0]} sees the public headers alone" if included.split("/")[0] in LAYERS else None
    if here is None:
        return None
    there = layer_of(target)
    if there is None and target.startswith("include/"):
        return "a public header without a layer: add it to HEADERS in tools/check_layers.py"
    if there not in LAYERS:
        return None  # a third-party header in quotes
    if path.startswith("include/") and not target.startswith("include/"):
        return "a public header includes a private one"
    return check_layers(here, there) or check_rooms(path, included)


def violations(root):
    found = []
    for name in tree.sources(root):
        if name.startswith("include/tessera/") and layer_of(name) is None:
            found.append(f"{name}: a public header without a layer: add it to HEADERS in tools/check_layers.py")
        if name.startswith("src/") and layer_of(name) not in LAYERS:
            found.append(f"{name}: a folder of src/ without a place in LAYERS of tools/check_layers.py")
            continue
        folder, room = room_of(name.removeprefix("src/")) if name.startswith("src/") else (None, None)
        if room is not None and room not in ROOMS.get(folder, []):
            found.append(f"{name}: a room without a place in ROOMS of tools/check_layers.py")
        for line, angled, included in tree.includes(tree.read(root, name)):
            reason = check_include(name, angled, included)
            if reason:
                found.append(f"{name}:{line}: {included}: {reason}")
    return found


def main():
    found = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"layers: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
