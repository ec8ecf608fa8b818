"""Time and memory of a transducer's loss with the joint network in front of it, forward and
backward: TDT against transformers', RNN-T against a full joint.

    python benchmarks/tdt_loss.py            # four rows, about three minutes on two cores
    python benchmarks/tdt_loss.py --rounds 5
    python benchmarks/tdt_loss.py --loss rnnt

transformers leaves the RNN-T loss to torchaudio. The full joint here is log_softmax over all of its
output and, on blanks and labels alone, the sum over all paths by autograd, which is small beside
it.

B=4, T=100, U=30, joint of 640; projections are normal and the head uniform as nn.Linear makes it.
Each row runs in separate processes, on one thread: processor time is the median of the rounds after
the first, memory the peak of resident memory above the inputs. Prints `tdt V=8193 full memory 0.03
time 0.42`: ours divided by theirs. The exit status is 1 if losses or gradients differ, or, for TDT,
memory is above 0.07 (V=8193) or 0.1 (V=1025), or time above 0.55."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

BATCH = 4
FRAMES = 100
LABELS = 30
WIDTH = 640
DURATIONS = (0, 1, 2, 3, 4)
SIGMA = 0.02
ROWS = [(outputs, kind) for outputs in (8193, 1025) for kind in ("full", "ragged")]
# Of the peer's. The recorded ones are 0.03 to 0.06; beside other programs the same row took 71 and
# 95 MiB, because the allocator uses what was freed in another order.
MOST_MEMORY = {8193: 0.07, 1025: 0.1}
MOST_TIME = 0.55  # of the peer's
MOST_DIFFERENCE = 1e-5  # of losses, relative
MOST_OF_GRADIENTS = 1e-4  # of the norms of gradients, relative: the peer's lattice is in fp32


def make_inputs(outputs: int, kind: str, durations: int):
    """[encoded, predicted, weight, bias], targets, frames and labels. `outputs`: tokens and
    blank."""
    import torch

    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(BATCH, FRAMES, WIDTH, generator=generator)
    predicted = torch.randn(BATCH, LABELS + 1, WIDTH, generator=generator)
    bound = WIDTH**-0.5
    rows = outputs + durations
    weight = torch.empty(rows, WIDTH).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(rows).uniform_(-bound, bound, generator=generator)
    targets = torch.randint(0, outputs - 1, (BATCH, LABELS), generator=generator)
    frames = torch.full((BATCH,), FRAMES)
    labels = torch.full((BATCH,), LABELS)
    if kind == "ragged":
        frames = torch.tensor([100, 80, 60, 45])
        labels = torch.tensor([30, 27, 25, 20])
    tensors = [tensor.requires_grad_() for tensor in (encoded, predicted, weight, bias)]
    return tensors, targets, frames, labels


def lean(tensors, targets, frames, labels):
    from models.parakeet.loss import Lattice, transducer_losses

    return transducer_losses(*tensors, Lattice(targets, frames, labels, DURATIONS, SIGMA)).sum()


def lean_rnnt(tensors, targets, frames, labels):
    from models.parakeet.loss import Lattice, transducer_losses

    return transducer_losses(*tensors, Lattice(targets, frames, labels, ())).sum()


def full_rnnt(tensors, targets, frames, labels):
    import torch

    encoded, predicted, weight, bias = tensors
    logits = (encoded[:, :, None] + predicted[:, None]).relu() @ weight.t() + bias
    found = logits.log_softmax(-1)
    blanks = found[..., -1].double()  # (B, T, U + 1)
    columns = targets[:, None, :, None].expand(-1, found.shape[1], -1, -1)
    taken = found[:, :, :-1].gather(3, columns)[..., 0].double()  # (B, T, U)
    climb = torch.nn.functional.pad(taken.cumsum(2), (1, 0))
    rows = []
    for t in range(found.shape[1]):
        before = rows[-1] + blanks[:, t - 1] if t else torch.full_like(climb[:, 0], -torch.inf)
        if t == 0:
            before[:, 0] = 0.0
        rows.append((before - climb[:, t]).logcumsumexp(1) + climb[:, t])
    ends = torch.stack(rows, dim=1) + blanks
    return -ends[torch.arange(len(frames)), frames - 1, labels].sum()


def peer(tensors, targets, frames, labels):
    from transformers.loss.loss_tdt import tdt_loss

    encoded, predicted, weight, bias = tensors
    logits = (encoded[:, :, None] + predicted[:, None]).relu() @ weight.t() + bias
    outputs = len(bias) - len(DURATIONS)
    tokens, durations = logits[..., :outputs], logits[..., outputs:]
    blank = outputs - 1
    return tdt_loss(
        tokens, durations, targets, frames, labels, blank, list(DURATIONS), SIGMA, "sum"
    )


# By loss: ours and the peer.
NAMES = {"tdt": ("lean", "peer"), "rnnt": ("lean_rnnt", "full_rnnt")}
FUNCTIONS = {function.__name__: function for function in (lean, peer, lean_rnnt, full_rnnt)}


def peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, outputs: int, kind: str, rounds: int) -> None:
    """Prints the results of one implementation as JSON, with the loss and norms of its
    gradients."""
    import torch

    torch.set_num_threads(1)
    function = FUNCTIONS[name]
    durations = 0 if function in (lean_rnnt, full_rnnt) else len(DURATIONS)
    tensors, targets, frames, labels = make_inputs(outputs, kind, durations)
    # A small case loads libraries and kernels.
    small = [tensor[:1, :3].detach().requires_grad_() for tensor in tensors[:2]]
    one = torch.ones(1, dtype=torch.long)
    function([*small, *tensors[2:]], targets[:1, :2], 3 * one, 2 * one).backward()
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    before = peak_resident()
    times = []
    for _ in range(rounds + 1):
        for tensor in tensors:
            tensor.grad.zero_()
        started = time.process_time()
        loss = function(tensors, targets, frames, labels)
        loss.backward()
        times.append(time.process_time() - started)
    norms = [float(tensor.grad.double().norm()) for tensor in tensors]
    results = {
        "time": statistics.median(times[1:]),
        "memory": peak_resident() - before,
        "values": [float(loss.detach()), *norms],
    }
    print(json.dumps(results))


def measured(name: str, outputs: int, kind: str, rounds: int) -> dict:
    """The results of `measure` in a separate process."""
    command = [sys.executable, __file__, "--rounds", str(rounds)]
    command += ["--measure", name, str(outputs), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss", choices=NAMES, default="tdt")
    parser.add_argument(
        "--measure", nargs=3, metavar=("NAME", "OUTPUTS", "KIND"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.measure:
        name, outputs, kind = args.measure
        measure(name, int(outputs), kind, args.rounds)
        return 0
    failed = False
    of_lean, of_peer = NAMES[args.loss]
    print(common.spinning())
    for outputs, kind in ROWS:
        theirs = measured(of_peer, outputs, kind, args.rounds)
        ours = measured(of_lean, outputs, kind, args.rounds)
        memory = ours["memory"] / theirs["memory"]
        seconds = ours["time"] / theirs["time"]
        pairs = zip(ours["values"], theirs["values"], strict=True)
        of_loss, *of_gradients = [abs(a - b) / abs(b) for a, b in pairs]
        print(f"{args.loss} V={outputs} {kind} memory {memory:.2f} time {seconds:.2f}", flush=True)
        print(
            f"  {ours['memory'] >> 20} of {theirs['memory'] >> 20} MiB, {ours['time']:.2f} of"
            f" {theirs['time']:.2f} s, losses differ by {of_loss:.0e}, norms of gradients by"
            f" {max(of_gradients):.0e}",
            flush=True,
        )
        if args.loss == "tdt":
            failed |= memory > MOST_MEMORY[outputs] or seconds > MOST_TIME
        failed |= of_loss > MOST_DIFFERENCE or max(of_gradients) > MOST_OF_GRADIENTS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
