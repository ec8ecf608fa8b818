"""The command of a preset script: picks tier, size, data word and row, and prints or starts it.

    python common/preset.py NAME=TEXT ... -- WORD ...

`run` in common/env.sh calls it so, with the script's variables (`Script`) and the user's words. It
runs before anything is installed: with the standard library alone, Python 3.10.

A script has a table, the text `rows`. The first row that matches tier and size counts; * matches
any, # begins a comment:
    TIER SIZE BATCH ACCUMULATION [LETTER...] [FLAG...]
    TIER SIZE + FLAG...    adds flags to the rows below it
    TIER SIZE ! SIZES      this size does not fit, SIZES do
    TIER SIZE S BATCH ACCUMULATION [LETTER...] [FLAG...]    counts with --sharded only
    TIER SIZE L BATCH ACCUMULATION [LETTER...] [FLAG...]    counts with --lora only
LETTERS has the flags of the letters. A second text, `adds`, has flags that a recipe gets besides:
    WORD... [unless WORD...]: FLAG...
They are added if all words before `unless` hold and none after it. A flag holds if the user gave
it, a tier, a size or a data word if it was picked, and `new` if a model from scratch has the size
of the row. SIZE among the flags stands for the size."""

import functools
import glob
import itertools
import os
import re
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).absolute().parents[1]

LETTERS = {
    "R": ["--gradient_checkpointing"],
    "F": ["--freeze_encoder"],
    "8": ["--optimizer", "adamw_8bit"],
    "H": ["--use_cpu_offload", "states"],
    "G": ["--use_cpu_offload", "gradients"],
    "W": ["--use_cpu_offload", "weights"],
}

# The least MiB of each tier. nvidia-smi reports 15,109 to 15,360 for a T4, 16,376 for an RTX 4080
# and 12,282 to 12,288 for cards with 12 GB.
MEMORY = {
    "a100": 70000,
    "32gb": 31000,
    "24gb": 22000,
    "16gb": 15900,
    "t4": 14900,
    "12gb": 11500,
    "8gb": 7000,
    "6gb": 5600,
    "4gb": 0,
}

# How much speech there is: under 2 hours, under 20 hours, more (speech/data/hours.py), and the most
# utterances of an update then, 0: those of the row.
DATA = {"small_data": 16, "medium_data": 48, "large_data": 0}

# How often the processes are started anew after one of them has ended: out of memory with
# --sharded, a machine that is lost.
RESTARTS = "5"

# Flags that name the training data.
RECORDED = ("--train_csv", "--train_manifest", "--data_dir")
# With one of these a recipe trains nothing.
USES = ("--transcribe", "--align", "--synthesize", "--evaluate")
# With --export and a model it trains nothing either, unless one of these is given.
TRAINS = (*RECORDED, "--conditions", "--from_scratch", "--max_steps", "--num_epochs")
TRAINS += ("--dry_run", "--verify_gpu")


@dataclass(frozen=True)
class Script:
    """A preset script's settings, empty where it has none."""

    recipe: str
    rows: str
    adds: str = ""
    # the size with one of the flags `brings`; without them demo, if the table has it
    usual: str = ""
    brings: str = ""  # flags that bring a model or data
    light: str = ""  # the size for a model whose file has less than so many MB, and this number
    always: str = ""  # flags of every command
    python: str = ""  # an interpreter that has the packages

    def recorded(self) -> list[str]:
        """The flags that name the training data, by whose hours an update is cut."""
        return [flag for flag in RECORDED if flag in self.brings.split()]


@dataclass(frozen=True)
class User:
    """The words of a command line. `tier` is auto, `size` and `data` are empty if they are left
    out. `flags` are the words from the first flag on."""

    tier: str
    size: str
    data: str
    flags: list[str]

    def gave(self, *flags: str) -> bool:
        """Whether one of these flags is there, as FLAG or FLAG=value."""
        return any(word.partition("=")[0] in flags for word in self.flags)

    def words(self, *flags: str) -> list[str]:
        """The words that follow the last of these flags."""
        found: list[str] = []
        follows = False
        for word in self.flags:
            if word.startswith("-"):
                flag, _, rest = word.partition("=")
                follows = flag in flags
                if follows:
                    found = [rest] if rest else []
            elif follows:
                found.append(word)
        return found

    def value(self, *flags: str) -> str:
        """The words that follow the last of these flags as one text, empty without them."""
        return " ".join(self.words(*flags))


@dataclass(frozen=True)
class Machines:
    """The processes of a command."""

    gpus: int = 1  # on each machine
    nodes: int = 1  # machines
    node: str = ""  # the number of this one
    head: str = ""  # where they meet
    ranks: int = 1  # that share an update, of those that are planned, too
    several: str = ""  # these numbers for messages


def say(text: str) -> None:
    print(text, file=sys.stderr)


def fail(message: str) -> NoReturn:
    """Ends the program as a usage error."""
    say(f"error: {message}")
    sys.exit(2)


# --- the table ------------------------------------------------------------------------------------


def read_rows(text: str) -> list[list[str]]:
    """The words of each row of a table, without comments."""
    rows = [line.split("#")[0].split() for line in text.splitlines()]
    return [row for row in rows if row]


def names(rows: list[list[str]], column: int) -> list[str]:
    """The words in a column, each once."""
    return list(dict.fromkeys(row[column] for row in rows if row[column] != "*"))


def find_row(rows: list[list[str]], user: User, size: str) -> tuple[list[str], list[str]]:
    """The row that counts, from its micro-batch on, and the flags of the + rows above it."""
    more = []
    advice = ""
    for row_tier, row_size, *row in rows:
        if row_tier not in (user.tier, "*") or row_size not in (size, "*"):
            continue
        if row[0] == "+":
            more += row[1:]
        elif row[0] == "S":
            if user.gave("--sharded"):
                return row[1:], more
        elif row[0] == "L":
            if user.gave("--lora"):
                return row[1:], more
            advice = ", or add --lora 32"
        elif row[0] == "!":
            fail(f"{size} does not fit in tier {user.tier}: take {' '.join(row[1:])}{advice}")
        else:
            return row, more
    fail(f"size {size} has no row in tier {user.tier}: take another size")


def letter_flags(letters: list[str], user: User, size: str) -> list[str]:
    """The flags of a row's letters. Of 8 and the levels of --use_cpu_offload the user's choice
    wins. --sharded needs neither and excludes both, and --lora excludes the levels."""
    flags = []
    levels = []
    for letter in letters:
        if letter in "HGW":
            levels = LETTERS[letter]  # after the other flags
        elif letter != "8" or not user.gave("--use_cpu_offload", "--sharded", "--lora"):
            flags += LETTERS[letter]
    if not user.gave("--sharded", "--lora") and user.value("--optimizer") != "adamw_8bit":
        flags += levels
    if "F" in letters and not user.gave("--model_dir", "--model_file", "--resume", "--dry_run"):
        fail(
            f"{size} fits in tier {user.tier} only with a frozen encoder of a given model:"
            " add --model_dir or --model_file, or take a smaller size"
        )
    return flags


def added_flags(adds: str, facts: set[str], size: str) -> list[str]:
    """The flags of the lines of `adds` that hold."""
    flags = []
    for line in adds.splitlines():
        condition, _, added = line.split("#")[0].partition(":")
        needed, _, excluded = condition.partition("unless")
        if facts.issuperset(needed.split()) and facts.isdisjoint(excluded.split()):
            flags += [size if word == "SIZE" else word for word in added.split()]
    return flags


# --- the choice -----------------------------------------------------------------------------------


def read_user(script: Script, words: list[str]) -> User:
    """The user's words. Data words may stand beside tier and size, and --print anywhere."""
    is_printed = "--print" in words
    words = [word for word in words if word != "--print"]
    picked = []
    data = ""
    while words and not words[0].startswith("-"):
        word = words.pop(0)
        if script.recorded() and word in DATA:
            data = word
        elif len(picked) == 2:
            fail(f"the word '{word}' is too much: first come TIER and SIZE, then flags")
        else:
            picked.append(word)
    words += ["--print"] * is_printed
    picked = picked or ["auto"]
    return User(picked[0].lower(), "".join(picked[1:]).lower(), data, words)


def pick_tier(tiers: list[str], user: User) -> str:
    """The card of a plan, else the largest tier for the memory of the first visible GPU, or cpu."""
    if user.gave("--dry_run"):
        card = re.sub(r"^[0-9]+ *x", "", user.value("--dry_run").lower())  # "2x16gb"
        words = [card.replace(" ", ""), *card.split()]  # "8 GB", "A100 80GB"
        if found := [word for word in words if word in tiers]:
            return found[-1]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if not gpu:
        return "cpu"
    is_slice = gpu.startswith("MIG-")  # nvidia-smi does not find it by its name
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if not is_slice:
        query += ["-i", gpu.split(",")[0]]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return "cpu"
    if answer.returncode:
        return "cpu"
    text = answer.stdout.strip()
    memory = int(text) if text.isdigit() and not is_slice else 0  # [N/A]: the CPU's memory
    listed = [tier for tier in MEMORY if tier in tiers]
    fitting = [tier for tier in listed if memory >= MEMORY[tier]]
    return [*fitting, *listed[-1:], "cpu"][0]


def read_number(name: str, what: str) -> int:
    """The positive number in a variable of the environment, 1 if it is not set."""
    text = os.environ.get(name) or "1"
    if not re.fullmatch("[1-9][0-9]*", text):
        fail(f"{name}={text}: it must be the number of {what}, such as 2")
    return int(text)


def read_machines(user: User) -> tuple[Machines, list[str]]:
    """The processes by GPUS, NODES, NODE and HEAD, and the words with which one plans for all."""
    gpus = read_number("GPUS", "GPUs to train on")
    nodes = read_number("NODES", "machines")
    node = os.environ.get("NODE", "")
    head = os.environ.get("HEAD", "")
    ranks = nodes * gpus
    several = f"NODES={nodes} GPUS={gpus}" if nodes > 1 else f"GPUS={gpus}"
    if user.gave("--dry_run"):
        card = user.value("--dry_run")
        if found := re.match("([0-9]+) *[xX]", card):
            ranks = int(found[1]) or 1
            return Machines(ranks=ranks, several=f"GPUS={ranks}"), []
        if ranks == 1:
            return Machines(), []
        say(f"{several}: one process plans for {ranks}x{card}")
        return Machines(ranks=ranks, several=several), ["--dry_run", f"{ranks}x{card}"]
    if ranks > 1 and (only_uses_a_model(user) or user.gave("--verify_gpu")):
        say(f"{several} is ignored: this command runs in one process")
        return Machines(), []
    if nodes > 1:
        if not re.fullmatch("0|[1-9][0-9]*", node) or int(node) >= nodes:
            fail(f"NODES={nodes} NODE={node}: NODE must be this machine's number, 0 to {nodes - 1}")
        if not re.fullmatch("[^:]+:[0-9]+", head):
            fail(
                f"HEAD={head}: it must be the address of machine 0 and a free port there,"
                " such as 192.168.1.5:29500"
            )
    return Machines(gpus, nodes, node, head, ranks, several), []


def only_uses_a_model(user: User) -> bool:
    """Whether the recipe trains nothing, so that it needs no row. An export without training writes
    the weights of --resume or of a released model."""
    if user.gave(*USES):
        return True
    if not user.gave("--export", "--export_adapter"):
        return False
    if not user.gave("--resume", "--model_dir", "--model_file"):
        return False
    return user.value("--resume") != "auto" and not user.gave(*TRAINS)


def pick_size(script: Script, user: User, sizes: list[str]) -> str:
    """SIZE if the user gave it, else the script's usual one, or demo."""
    if "demo" in sizes and not user.gave(*script.brings.split()):
        return user.size or "demo"
    usual = script.usual or next((size for size in sizes if size != "demo"), "")
    if script.light and is_light(user, int(script.light.split()[1])):
        usual = script.light.split()[0]
    if user.size == "demo" and user.gave("--model_dir", "--model_file"):
        fail(
            f"size demo is a small model that begins at random: take {usual} or another size, or"
            " leave out --model_dir and --model_file"
        )
    return user.size or usual


def is_light(user: User, megabytes: int) -> bool:
    """Whether the file of the user's model is smaller than this."""
    given = user.value("--model_file", "--model_dir")
    files = [given, f"{given}/model.safetensors", *glob.glob(f"{glob.escape(given)}/*.nemo")]
    return any(os.path.isfile(file) and os.path.getsize(file) < megabytes * 2**20 for file in files)


def pick_data(script: Script, user: User) -> str:
    """The word for the hours of speech in the training data, unless the user gave one."""
    if user.data:
        return user.data
    manifests = user.words(*script.recorded())
    if not manifests or not all(os.path.exists(each) or glob.glob(each) for each in manifests):
        return "large_data"
    unknown = "data: large_data (auto: the hours of speech are not known"
    if user.gave("--print") and not script.python:
        say(f"{unknown} before the packages are installed)")
        return "large_data"
    command = [script.python or install(), str(ROOT / "speech/data/hours.py"), *manifests]
    for flag in ("--audio_root", "--max_samples"):
        if user.gave(flag):
            command += [flag, user.value(flag)]
    if user.gave("--tier"):
        command += ["--tier", *user.words("--tier")]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if told.returncode:
        say(f"{unknown})")
        return "large_data"
    word, hours = told.stdout.strip().split(" ", 1)
    say(f"data: {word} (auto: {hours} h of speech)")
    return word


def cut_update(row: list[str], data: str, user: User, machines: Machines) -> tuple[int, int]:
    """Micro-batch and accumulation steps of a GPU's share of the update, in micro-batches that are
    as large as the row allows and divide the share. For more than eight GPUs the update is rounded
    up to a multiple: the guides' updates have no factor of 16."""
    batch, accumulation = int(row[0]), int(row[1])
    update = batch * accumulation
    update = min(update, DATA.get(data) or update)
    share, rest = divmod(update, machines.ranks)
    if rest and machines.ranks > 8:
        share += 1
        whole = share * machines.ranks
        say(f"update: {whole} utterances, because {machines.ranks} GPUs do not divide {update}")
    elif rest and user.gave("--batch_size") and user.gave("--gradient_accumulation_steps"):
        return batch, accumulation
    elif rest:
        fail(
            f"{machines.several} does not divide an update of {update}: take 2, 4 or 8 in all, or"
            " give each GPU's --batch_size and --gradient_accumulation_steps"
        )
    while share % batch:
        batch -= 1
    return batch, share // batch


def accumulation_of(batch: str, update: int, ranks: int) -> int:
    """The accumulation steps with which the user's micro-batch makes a GPU's share of the preset's
    update, or the nearest larger one."""
    size = int(batch) if re.fullmatch("[1-9][0-9]{0,5}", batch) else update
    steps = -(-update // size)
    if steps * size != update:
        made, usual = steps * size * ranks, update * ranks
        say(f"update: {made} utterances in place of {usual}, because of --batch_size")
    return steps


def row_flags(script: Script, user: User, machines: Machines, rows: list[list[str]]) -> list[str]:
    """The flags of a training: those of the row, and those that the recipe gets besides."""
    size = pick_size(script, user, names(rows, 1))
    row, more = find_row(rows, user, size)
    data = user.data
    if script.recorded() and (size != "demo" or user.gave(*script.recorded())):
        data = pick_data(script, user)
    elif data:
        flags = " or ".join(script.recorded())
        fail(f"{data} is for your own recordings: add {flags} or a model")
    batch, accumulation = cut_update(row, data, user, machines)
    letters = list(itertools.takewhile(lambda word: not word.startswith("--"), row[2:]))
    if user.gave("--batch_size") and not user.gave("--gradient_accumulation_steps"):
        given = user.value("--batch_size")
        accumulation = accumulation_of(given, batch * accumulation, machines.ranks)
    flags = ["--batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
    flags += letter_flags(letters, user, size)
    flags += more + row[2 + len(letters) :]

    facts = {user.tier, size, data}
    facts |= {word.partition("=")[0] for word in user.flags if word.startswith("-")}
    # A released model has its own size. So has a resumed one, unless the user gave SIZE.
    is_given = user.gave("--model_dir", "--model_file")
    is_resumed = user.gave("--resume") and not user.size
    is_own = size != "demo" or user.gave(*script.brings.split())
    if is_own and not is_given and not is_resumed:
        facts.add("new")
    flags += added_flags(script.adds, facts, size)
    if not user.gave("--resume"):
        flags += ["--resume", "auto"]  # the same command, run again, resumes the run
    return flags


def choose(script: Script, user: User) -> tuple[User, Machines, list[str]]:
    """The user's words with a real tier, the processes, and the command as --print shows it: the
    preset's flags, then the user's, which win."""
    rows = read_rows(script.rows)
    tiers = names(rows, 0)
    sizes = names(rows, 1)
    device = "cpu"
    if user.tier == "auto":
        user = replace(user, tier=pick_tier(tiers, user))
        device = "auto"  # torch may find a GPU where there is no nvidia-smi
        say(f"tier: {user.tier} (auto)")
    if user.tier not in tiers:
        known = ", ".join(["auto", *tiers])
        fail(f"no tier '{user.tier}': it is one of {known}; a size comes after it, then flags")
    if user.size and user.size not in sizes:
        fail(f"no size '{user.size}': it is one of {', '.join(sizes)}")
    machines, planned = read_machines(user)
    flags = ["--mixed_precision"]
    if user.tier == "cpu":
        flags += ["--device", device]
    flags += script.always.split()
    if not only_uses_a_model(user):
        flags += row_flags(script, user, machines, rows)
    flags += [word for word in user.flags if word != "--print"]
    recipe = str(ROOT / "recipes" / f"{script.recipe}.py")
    return user, machines, [*launcher_words(script, user, machines), recipe, *flags, *planned]


# --- the start ------------------------------------------------------------------------------------


def launcher_words(script: Script, user: User, machines: Machines) -> list[str]:
    """The words before the recipe: a variable for torchrun, the launcher and its options. Machines
    meet at HEAD: they wait an hour for one that is missing, and ten minutes for an answer of
    machine 0. torchrun numbers them by address, of which only that of machine 0 is used; ~ sorts
    the others behind it, by NODE."""
    if machines.gpus * machines.nodes == 1:
        return ["python"]
    processes = ["--nproc_per_node", str(machines.gpus)]
    if machines.nodes == 1 and not user.gave("--sharded"):
        return ["torchrun", "--standalone", *processes]
    # Without it, processes that start anew find the addresses of those before them, and a machine
    # that comes back finds no address at all (torch 2.11).
    words = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"]
    if machines.nodes == 1:
        words += ["--standalone", "--local_addr", "localhost"]
    else:
        address = machines.head.rpartition(":")[0]
        if machines.node != "0":
            address = f"~{int(machines.node):05d}"
        is_host = int(machines.node == "0")
        words += ["--nnodes", str(machines.nodes), "--rdzv_backend", "c10d"]
        words += ["--rdzv_endpoint", machines.head, "--rdzv_id", script.recipe]
        words += ["--rdzv_conf", f"join_timeout=3600,read_timeout=600,is_host={is_host}"]
        words += ["--local_addr", address]
    return [*words, *processes, "--max_restarts", RESTARTS]


def interface_to(host: str) -> str:
    """The network interface whose address other machines see, if the name of this one stands for
    itself alone (127.0.1.1 in Ubuntu's /etc/hosts): gloo would take that. Else nothing."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect((host, 9))  # sends nothing
        own = out.getsockname()[0]
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127.") or own.startswith("127."):
            return ""
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(out.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return ""


@functools.cache
def install() -> str:
    """The interpreter that has the packages, after env.sh has installed what is missing."""
    command = ["bash", str(ROOT / "common/env.sh"), "ensure_python", "requirements.txt"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(made.returncode)
    return made.stdout.strip()


def start(words: list[str], machines: Machines, python: str) -> NoReturn:
    """Replaces this program by the recipe, or by torchrun."""
    if "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    if words.pop(0) == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
        if machines.nodes > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
            try:
                name = interface_to(machines.head.rpartition(":")[0])
            except OSError:
                name = ""  # torch will say that there is no such host
            if name:
                os.environ["GLOO_SOCKET_IFNAME"] = name
    os.execv(python, [python, *words])


def main() -> None:
    end = sys.argv.index("--")
    script = Script(**dict(word.split("=", 1) for word in sys.argv[1:end]))
    user = read_user(script, sys.argv[end + 1 :])
    if user.gave("--rows"):
        print(script.rows)
        return
    has_demo = "demo" in names(read_rows(script.rows), 1)
    if script.brings and not has_demo and not user.flags:
        flags = script.brings.replace(" ", ", ")
        fail(f"{script.recipe} has no demo: give it a model and recordings, with {flags}")
    user, machines, words = choose(script, user)
    if user.gave("--print"):
        # As bash quotes it.
        os.execvp("bash", ["bash", "-c", 'printf %s "$0"; printf \' %q\' "$@"; echo', *words])
    os.environ["PRESET_TIER"] = user.tier  # for best.json
    start(words, machines, script.python or install())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # while something is installed, or the lengths of recordings are read
        sys.exit(130)
