"""A training by PyTorch that is killed and starts again:  restart.py DATA RUN METRICS EVERY [flags of the model]

examples/peers/train_gpt.py with saves by dcp.async_save into RUN/step{N} every EVERY steps, which goes on from the newest that is
whole. Prints and writes what train_gpt does, as far as bench/restart.py reads it.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "examples/peers"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import train_gpt  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

data, run, metrics, every = sys.argv[1:5]
run, every = pathlib.Path(run), int(every)
sys.argv = [sys.argv[0], "--data", data, "--steps", "1000000", *sys.argv[5:]]


def newest():
    steps = [int(place.parent.name[4:]) for place in run.glob("step*/.metadata")]
    return run / f"step{max(steps)}" if steps else None


args = train_gpt.arguments()
torch.set_num_threads(1)
dist.init_process_group("gloo")
saving = dist.new_group()
model, optimizer = train_gpt.build(args, init_device_mesh("cpu", (dist.get_world_size(),)))
text = train_gpt.Text(args.data, args.seq, args.seed)
done, found, pending = 0, newest(), None
if found:
    done = train_gpt.resume(str(found), model, optimizer)
    if dist.get_rank() == 0:
        print(f"resumed from {found} after step {done}", flush=True)
while True:
    loss = train_gpt.step(args, model, optimizer, text, done)
    done += 1
    if dist.get_rank() == 0:
        with open(metrics, "a", encoding="ascii") as file:
            file.write(f"{done},{loss:.9g}\n")
    if done % every == 0:
        if pending:
            pending.result()
        model_state, optim_state = get_state_dict(model, optimizer)
        pending = dcp.async_save({"model": model_state, "optim": optim_state}, checkpoint_id=run / f"step{done}", process_group=saving)
