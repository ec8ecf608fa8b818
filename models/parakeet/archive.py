"""The container of NVIDIA's models: a `.nemo` archive is a tar with a yaml of settings, a PyTorch
checkpoint and a SentencePiece model.

An archive can come from anywhere. Reading it runs no code, writes nothing but the checkpoint into a
folder that the caller names, and takes no more memory or time than the file's size allows."""

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import yaml

from common.errors import UsageError, first_line
from models import model_files

YAML = "model_config.yaml"
CKPT = "model_weights.ckpt"
TOKENIZER = re.compile(r"(?:.+_)?tokenizer\.model")
TEXT_BYTES = 1 << 22  # of the yaml and of a SentencePiece model; 8,192 pieces take less than 1 MiB
MEMBERS = 200  # of an archive; NeMo writes six
DEPTH = 50  # of the yaml; libyaml's loader crashes at some thousands
ENTRIES = 1 << 18  # of the yaml; a hybrid with 8,192 pieces has some 25,000
DIGITS = 1000  # of a number in the yaml; Python does not print more than 4,300
# What reading a damaged archive raises.
DAMAGED = (tarfile.TarError, EOFError, RecursionError, ValueError)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


# --- reading --------------------------------------------------------------------------------------


def unpack(path: Path, folder: Path | None = None) -> dict[str, bytes]:
    """Copies the checkpoint of an archive to `folder` / CKPT, if one is given, and returns the yaml
    and the SentencePiece models by name. Other members are skipped. Raises `UsageError`."""
    model_files.refuse_pointer(path)
    try:
        with open(path, "rb") as file:
            stream = _Stream(file, path.stat().st_size + (1 << 20))
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                members = _read_members(archive, path, folder)
    except DAMAGED as error:
        raise UsageError(
            f"{path} is not a .nemo archive, or damaged or cut short ({first_line(error)[:80]}):"
            " fetch it again"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        where = f"unpacked in {folder.parent}" if folder else "read"
        raise UsageError(f"{path} cannot be {where}: {reason}") from None
    needed = {YAML: YAML in members, CKPT: folder is None or (folder / CKPT).is_file()}
    for name, is_there in needed.items():
        if not is_there:
            raise UsageError(f"{path} is not a .nemo archive: it lacks {name}")
    return members


class _Stream:
    """A file that is read forwards, and only up to `limit` bytes. tarfile trusts sizes in headers,
    even negative and huge ones."""

    def __init__(self, file, limit: int):
        self.file = file
        self.limit = limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.limit - self.file.tell():
            raise tarfile.ReadError("it holds more than its size allows")
        return self.file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        if whence or not self.file.tell() - 1 <= position <= self.limit:
            raise tarfile.ReadError("it holds more than its size allows")
        return self.file.seek(position)

    def tell(self) -> int:
        return self.file.tell()


def _read_members(archive: tarfile.TarFile, path: Path, folder: Path | None) -> dict[str, bytes]:
    names = set()
    texts = {}
    for member in archive:
        name = member.name.removeprefix("./")
        if reason := _refusal(member, name, names):
            raise UsageError(f"{path} is refused: {name[:60]!r}: {reason}, which NeMo never writes")
        names.add(name)
        if not member.isreg():
            continue
        if _is_text(name):
            texts[name] = archive.extractfile(member).read()
        elif name == CKPT and folder:
            with open(folder / CKPT, "wb") as file:
                shutil.copyfileobj(archive.extractfile(member), file, 1 << 20)
    return texts


def _is_text(name: str) -> bool:
    return name == YAML or ("/" not in name and TOKENIZER.fullmatch(name) is not None)


def _refusal(member: tarfile.TarInfo, name: str, earlier: set[str]) -> str | None:
    """Why an archive with this member is refused, or None."""
    if name.startswith("/") or ".." in name.split("/") or "\\" in name:
        return "it lies outside the archive"
    is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
    if not is_plain or member.issparse():
        return "it is not a regular file"
    if name in earlier:
        return "it is there twice"
    if len(earlier) >= MEMBERS:
        return f"there are more than {MEMBERS} files"
    if _is_text(name) and member.size > TEXT_BYTES:
        return f"it has {member.size / 2**20:.0f} MiB"
    return None


def load_yaml(raw: bytes, path: str | Path) -> dict:
    """The settings in a yaml. Raises `UsageError`, also for references, which can make a small file
    huge."""
    try:
        text = raw.decode()
        _check_events(text)
        content = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError) as error:
        raise UsageError(f"{path}: its {YAML} is refused: {first_line(error)[:100]}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: its {YAML} is refused: it is not a table")
    return content


def _check_events(text: str) -> None:
    """Raises `YAMLError` for what `yaml.load` would take too much time or memory for."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=LOADER)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.AliasEvent) or depth > DEPTH or number > ENTRIES:
            raise yaml.YAMLError("references, deep nesting or too many entries")
        may_be_number = isinstance(event, yaml.ScalarEvent) and not event.style
        if may_be_number and len(event.value) > DIGITS:
            raise yaml.YAMLError("a long number")


# --- writing --------------------------------------------------------------------------------------


def dump_yaml(content: dict) -> bytes:
    return yaml.dump(content, Dumper=DUMPER, sort_keys=False, allow_unicode=True).encode()


def write(path: Path, members: dict[str, bytes | Callable[[BinaryIO], None]]) -> None:
    """Writes an archive, a plain tar. A member is its bytes, or a function that writes it into the
    open file: weights then need no second place."""
    with open(path, "wb") as file:
        for name, content in members.items():
            start = file.tell()
            file.write(bytes(tarfile.BLOCKSIZE))  # the header, which needs the size
            if callable(content):
                content(file)
            else:
                file.write(content)
            header = tarfile.TarInfo(f"./{name}")
            header.size = file.tell() - start - tarfile.BLOCKSIZE
            file.write(bytes(-header.size % tarfile.BLOCKSIZE))
            end = file.tell()
            file.seek(start)
            file.write(header.tobuf(tarfile.GNU_FORMAT))
            file.seek(end)
        file.write(bytes(2 * tarfile.BLOCKSIZE))  # a tar's end
