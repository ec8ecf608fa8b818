"""Time and memory of the TDT loss with the joint network in front of it, forward and backward,
against transformers'.

    python benchmarks/tdt_loss.py            # four rows, about three minutes on two cores
    python benchmarks/tdt_loss.py --rounds 5

B=4, T=100, U=30, joint of 640; projections are normal and the head uniform as nn.Linear makes it.
Each row runs in processes of its own, on one thread: processor time is the median of the rounds
after the first, memory the peak of resident memory above the inputs. Prints `tdt V=8193 full memory
0.03 time 0.42`: ours divided by theirs. The exit status is 1 if losses or gradients differ, memory
is above 0.05 (V=8193) or 0.08 (V=1025), or time above 0.55."""

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

BATCH, FRAMES, LABELS, WIDTH = 4, 100, 30, 640
DURATIONS = (0, 1, 2, 3, 4)
ROWS = [(outputs, kind) for outputs in (8193, 1025) for kind in ("full", "ragged")]
MOST_MEMORY, MOST_TIME, MOST_DIFFERENCE = {8193: 0.05, 1025: 0.08}, 0.55, 1e-5


def make_inputs(outputs: int, kind: str):
    import torch

    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(BATCH, FRAMES, WIDTH, generator=generator)
    predicted = torch.randn(BATCH, LABELS + 1, WIDTH, generator=generator)
    bound = WIDTH**-0.5
    weight = torch.empty(outputs + len(DURATIONS), WIDTH).uniform_(
        -bound, bound, generator=generator
    )
    bias = torch.empty(outputs + len(DURATIONS)).uniform_(-bound, bound, generator=generator)
    targets = torch.randint(0, outputs - 1, (BATCH, LABELS), generator=generator)
    frames, labels = torch.full((BATCH,), FRAMES), torch.full((BATCH,), LABELS)
    if kind == "ragged":
        frames, labels = torch.tensor([100, 80, 60, 45]), torch.tensor([30, 27, 25, 20])
    return (
        [tensor.requires_grad_() for tensor in (encoded, predicted, weight, bias)],
        targets,
        frames,
        labels,
    )


def lean(tensors, targets, frames, labels):
    from speech.parakeet.loss import Lattice, tdt_losses

    return tdt_losses(*tensors, Lattice(targets, frames, labels, DURATIONS, 0.02)).sum()


def peer(tensors, targets, frames, labels):
    from transformers.loss.loss_tdt import tdt_loss

    encoded, predicted, weight, bias = tensors
    logits = (encoded[:, :, None] + predicted[:, None]).relu() @ weight.t() + bias
    tokens = len(bias) - len(DURATIONS)
    return tdt_loss(
        logits[..., :tokens],
        logits[..., tokens:],
        targets,
        frames,
        labels,
        tokens - 1,
        list(DURATIONS),
        0.02,
        "sum",
    )


def peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, outputs: int, kind: str, rounds: int) -> None:
    """Prints the results of one implementation as JSON, with the loss and norms of its
    gradients."""
    import torch

    torch.set_num_threads(1)
    function = {"lean": lean, "peer": peer}[name]
    tensors, targets, frames, labels = make_inputs(outputs, kind)
    small = [
        tensor[:1, :3].detach().requires_grad_() for tensor in tensors[:2]
    ]  # loads libraries and kernels
    one = torch.ones(1, dtype=torch.long)
    function([*small, *tensors[2:]], targets[:1, :2], 3 * one, 2 * one).backward()
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    before, times = peak_resident(), []
    for _ in range(rounds + 1):
        for tensor in tensors:
            tensor.grad.zero_()
        started = time.process_time()
        loss = function(tensors, targets, frames, labels)
        loss.backward()
        times.append(time.process_time() - started)
    values = [float(loss.detach()), *(float(tensor.grad.double().norm()) for tensor in tensors)]
    print(
        json.dumps(
            {
                "time": statistics.median(times[1:]),
                "memory": peak_resident() - before,
                "values": values,
            }
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--measure", nargs=3, metavar=("NAME", "OUTPUTS", "KIND"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]), args.measure[2], args.rounds)
        return 0
    failed = False
    for outputs, kind in ROWS:
        results = {}
        for name in ("peer", "lean"):
            command = [
                sys.executable,
                __file__,
                "--rounds",
                str(args.rounds),
                "--measure",
                name,
                str(outputs),
                kind,
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            results[name] = json.loads(
                subprocess.run(command, check=True, capture_output=True, env=environment).stdout
            )
        ours, theirs = results["lean"], results["peer"]
        memory, seconds = ours["memory"] / theirs["memory"], ours["time"] / theirs["time"]
        pairs = zip(ours["values"], theirs["values"], strict=True)
        of_loss, *of_gradients = [abs(a - b) / abs(b) for a, b in pairs]
        print(f"tdt V={outputs} {kind} memory {memory:.2f} time {seconds:.2f}", flush=True)
        print(
            f"  {ours['memory'] >> 20} of {theirs['memory'] >> 20} MiB, {ours['time']:.2f} of"
            f" {theirs['time']:.2f} s, losses differ by {of_loss:.0e}, norms of gradients by"
            f" {max(of_gradients):.0e}",
            flush=True,
        )
        failed |= memory > MOST_MEMORY[outputs] or seconds > MOST_TIME
        failed |= (
            of_loss > MOST_DIFFERENCE or max(of_gradients) > 10 * MOST_DIFFERENCE
        )  # the peer's lattice is in fp32
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
