"""What lies beside a checkpoint, and is none of it. Each function answers false where that has no sense."""
import safetensors.torch
import torch

from places import model, tensor

SETS = ("single", "sharded", "tied")


def beside_torch(case, kind):
    if kind not in (*SETS, "unindexed"):
        return False
    torch.save(model(case.rng), case.folder / "pytorch_model.bin")
    case.states["pytorch_model.bin"] = "superseded"
    case.notes.append("pytorch_model.bin")


def beside_torch_set(case, kind):
    if kind not in (*SETS, "unindexed"):
        return False
    torch.save(model(case.rng), case.folder / "pytorch_model-00001-of-00001.bin")
    case.index("pytorch_model.bin.index.json", {"x": "pytorch_model-00001-of-00001.bin"})
    case.states["pytorch_model.bin.index.json"] = "superseded"
    case.notes.append("pytorch_model.bin.index.json")


def beside_form(case, kind):
    if kind not in (*SETS, "unindexed"):
        return False
    stem = case.rng.choice(("consolidated", "adapter_model", "consolidated-00001-of-00001"))
    name = f"{stem}.safetensors"
    case.write(name, model(case.rng))
    case.states[name] = "not part of it"
    case.notes.append(name)


def beside_torch_adapter(case, kind):
    if kind not in (*SETS, "unindexed", "torch_single"):
        return False
    torch.save(model(case.rng), case.folder / "adapter_model.bin")
    case.states["adapter_model.bin"] = "not part of it"
    case.notes.append("adapter_model.bin")


def beside_variant(case, kind):
    if kind not in SETS:
        return False
    stem = case.rng.choice(("model.fp16", "model.fp16-00001-of-00001", "model copy"))
    name = f"{stem}.safetensors"
    case.write(name, model(case.rng))
    case.states[name] = "not part of it"
    case.notes.append(name)


def beside_trainer(case, kind):
    for name in case.rng.sample(("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"), 2):
        torch.save({"state": tensor(case.rng)}, case.folder / name)
        case.states[name] = "not part of it"
        # In a set its name may be a shard's.
        if name.endswith(".bin") and kind == "torch_sharded":
            case.notes.append(name)


def beside_texts(case, kind):
    names = ("config.json", "tokenizer.json", "README.md", ".gitattributes", "model.safetensors.bak")
    for name in case.rng.sample(names, 3):
        case.text(name)
        case.states[name] = "not part of it"


def beside_folders(case, _):
    for name in case.rng.sample(("original", "onnx", "checkpoint-500", "1_Pooling", "logs"), 2):
        (case.folder / name).mkdir()
        safetensors.torch.save_file(model(case.rng), case.folder / name / "model.safetensors")


def beside_dcp(case, kind):
    """A file of another kind, or of an older save by more ranks."""
    if kind != "dcp":
        return False
    name = case.rng.choice(("__7_0.distcp", "model.safetensors", "pytorch_model.bin"))
    (torch.save if name.endswith(".bin") else safetensors.torch.save_file)(model(case.rng), case.folder / name)
    case.states[name] = "not understood"


def beside_ranks(case, kind):
    if kind != "single":
        return False
    case.write("model-rank-0-part-0.safetensors", model(case.rng))
    case.states["model-rank-0-part-0.safetensors"] = "not part of it"
    case.notes.append("model-rank-0-part-0.safetensors")


def beside_finder(case, kind):
    """What a Mac leaves on disks of others."""
    for name in list(case.shards):
        (case.folder / f"._{name}").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(100))


BESIDE = (
    beside_torch,
    beside_torch_set,
    beside_form,
    beside_torch_adapter,
    beside_variant,
    beside_trainer,
    beside_texts,
    beside_folders,
    beside_dcp,
    beside_ranks,
    beside_finder,
)
