"""Packs of several utterances, on which a released Whisper keeps its times and does not learn to
stop after one sentence.

A pack begins with one utterance of the training set. What follows is what follows in its
recording, with the pauses that were recorded, or, if there is nothing, other utterances of the same
speaker after silence. All is drawn by (seed, epoch, index), for a whole epoch at once, so that
batches can be laid out by the lengths of the packs.

    packs = Packs(corpus, tokens, share=0.25, seed=1, longest=30.0, room=444)
    lengths = packs.seconds(epoch)       # (N,) of the packs that begin with each utterance
    pack = packs.pack(index, epoch)  # which utterances, and where in the pack they are
    waveform = read(corpus, pack)
    packed = PackedUtterances(utterances, share=0.25)  # a data set of them

Source of the rules: Radford et al. 2022, section 2.3."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from common import options
from common.errors import UsageError
from common.options import TRAINS, flag
from models import released
from models.whisper.start import ModelInfo
from models.whisper.tokenizer import WhisperTokenizer, joined, make_tokenizer
from speech.data.columns import Codes, Corpus
from speech.signal.audio import SAMPLE_RATE, change_speed, read_utterance

DRAW = 13  # joins seed and epoch
USUAL_SHARE = 0.25  # of the packs have times, if utterances follow each other
FOLLOWED = 0.1  # share of the utterances that must
PREVIOUS_TOKENS = 223  # of the text before a pack, as programs that decode give them
# Share of the packs without times that are one utterance: longer ones cost more.
ALONE = 0.5
FULL = 0.25  # share of the others that are as long as the longest input
OPEN = 0.75  # share of the packs with times that may end within an utterance or a pause
PREVIOUS = 0.5  # share of the packs with the text before them
LEADS = 0.5  # share of those longer packs that begin in the pause before their first utterance
PAUSE = (0.2, 4.0)  # seconds between utterances that do not follow each other; half are below 0.9
FEW = 8  # utterances: speakers with fewer share packs
LONGEST_GAP = 5.0  # seconds between neighbours of one recording
OVERLAP = 0.05  # seconds by which the times of neighbours may overlap
SHORTEST_CUT = 0.3  # seconds of an utterance that the pack cuts
TIME_TOKENS = 2  # of each utterance: its start and its end
ROUNDING = 1e-6  # seconds
# Seconds of the pause before a window's first utterance. Programs begin a window where the last
# utterance of the one before it ends, so their windows begin with whole pauses.
LONGEST_LEAD = 2.0
# A pause that is longer than this may hold speech that the manifest has no text for.
LONG_PAUSE = 0.3  # seconds
EDGE = 0.25  # seconds of such a pause at its ends, or a quarter of it, that are left as they are
LOUD = 0.05  # mean square relative to that of the pack

# Rows for `Parser.refuse`: flags that exclude each other, and flags that need another one.
NO_TIMES = "a model from scratch has no time tokens"
NEEDS = (("timestamp_share", (*released.MODELS, "resume", "init_from"), NO_TIMES),)


@dataclass(frozen=True)
class Line:
    """Utterances one after the other, in places 0 to M - 1, in parts that belong together: arrays
    (M,)."""

    rows: np.ndarray  # the utterance
    starts: np.ndarray  # in seconds, ascending within a part
    ends: np.ndarray  # in seconds, ascending within a part
    heard: np.ndarray  # the latest end so far, which ascends over all places
    first: np.ndarray  # the places at which its part begins
    last: np.ndarray  # and ends

    def then(self, other: "Line") -> "Line":
        """This line, and `other` behind it."""
        shift = self.heard[-1] + 1.0
        places = len(self.rows)
        return Line(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.starts, other.starts + shift]),
            np.concatenate([self.ends, other.ends + shift]),
            np.concatenate([self.heard, other.heard + shift]),
            np.concatenate([self.first, other.first + np.int32(places)]),
            np.concatenate([self.last, other.last + np.int32(places)]),
        )


def compact(places: np.ndarray) -> np.ndarray:
    """The same in 32 bits: a line of a million utterances has three million places."""
    return places.astype(np.int32)


def recordings(corpus: Corpus) -> Line:
    """All utterances by file, channel and time. Those of a part follow each other in their
    recording: none of them overlaps another utterance, no pause is longer than LONGEST_GAP, and
    all are in one language, because a window has one language token."""
    channels = corpus.places()[2].astype(int).tolist()
    files = np.array(Codes(map("{}:{}".format, channels, corpus.paths)).codes)
    rows = np.lexsort([corpus.offsets, files])
    is_first = np.diff(files[rows], prepend=-1) != 0  # of its file
    offsets = corpus.offsets[rows]
    ends = offsets + corpus.seconds[rows]
    lengths = np.maximum.reduceat(ends, np.flatnonzero(is_first)) + 1.0
    shift = (np.cumsum(lengths) - lengths)[np.cumsum(is_first) - 1]  # one file after the other
    starts = shift + offsets
    ends = shift + ends
    heard = np.maximum.accumulate(ends)
    gaps = starts[1:] - heard[:-1]
    follows = ~is_first
    follows[1:] &= (gaps >= -OVERLAP) & (gaps <= LONGEST_GAP) & (ends[:-1] >= heard[:-1] - OVERLAP)
    languages = np.array(corpus.languages.codes)[rows]
    follows[1:] &= languages[1:] == languages[:-1]
    begins = np.flatnonzero(~follows)
    part = np.cumsum(~follows) - 1
    last = np.append(begins[1:], len(rows)) - 1
    return Line(compact(rows), starts, ends, heard, compact(begins[part]), compact(last[part]))


def followed(corpus: Corpus) -> float:
    """The share of the utterances that another one follows in their recording."""
    line = recordings(corpus)
    return float((line.last > np.arange(len(corpus))).mean())


def asked_share(
    given: float | None, tokenizer: WhisperTokenizer, pretrained: bool, resumed: bool | None
) -> float | None:
    """--timestamp_share for a model: what is `given`; what the run had that is resumed, if it
    trained with times (`resumed`); None if the training set decides (`usual_share`). Raises
    `UsageError` if a model that is not released, or its tokenizer, has no times."""
    has_times = pretrained and tokenizer.timestamp_begin is not None
    if given and not has_times:
        raise UsageError(
            f"--timestamp_share {given:g}: this model has no time tokens, which only a released"
            " multilingual or English model has; leave it out"
        )
    if given is not None or not has_times:
        return given or 0.0
    return None if resumed is None else USUAL_SHARE * resumed


def usual_share(corpus: Corpus) -> float:
    """--timestamp_share for a new run of a model with time tokens: USUAL_SHARE if utterances of the
    training set follow each other in their recordings."""
    share = followed(corpus)
    if share < FOLLOWED:
        print(
            "--timestamp_share 0: training on single utterances, even a short one, makes a model"
            f" lose sentences of long recordings; --timestamp_share {USUAL_SHARE:g} trains on"
            " windows of several utterances"
        )
        return 0.0
    print(
        f"--timestamp_share {USUAL_SHARE:g}: {100 * share:.0f} % of the training utterances are"
        " followed by another one of their recording; windows of them are trained on"
    )
    return USUAL_SHARE


def read_for(
    asked, info: ModelInfo, resumes: bool, read: Callable[[bool], dict[str, Corpus]]
) -> tuple[dict[str, Corpus], float]:
    """The corpora that a training of this model has, and the share of its packs that have times.
    `asked` has the flags --timestamp_share and --use_chunking. `read(times)` reads the corpora;
    without `times` it joins short segments of a recording, if at all. Raises `UsageError`."""
    tokenizer = make_tokenizer(info.tokenizer)
    resumed = info.times if resumes else None
    share = asked_share(asked.timestamp_share, tokenizer, info.pretrained, resumed)
    corpora = read(share != 0)
    if share is None:
        share = usual_share(corpora["train"])
        if asked.use_chunking and not share:
            corpora = read(False)
    return corpora, share


def drawn(groups: np.ndarray, seconds: np.ndarray, random: np.random.Generator) -> Line:
    """Utterances of `seconds` (N,) in random order within their groups (N,), 0 to G - 1, with
    pauses between them. Each group comes twice, one after the other: from every utterance in the
    first half, all others of its group follow."""
    order = random.permutation(len(groups))
    order = order[np.argsort(groups[order], kind="stable")]
    sizes = np.bincount(groups)
    begins = np.cumsum(sizes) - sizes
    group = np.repeat(np.arange(len(sizes)), 2 * sizes)
    places = np.arange(2 * len(groups))
    within = places - 2 * begins[group]
    rows = order[begins[group] + within % sizes[group]]
    shortest, longest = PAUSE
    pauses = shortest * (longest / shortest) ** random.random(len(groups))
    lengths = seconds[rows] + pauses[rows]
    ends = np.cumsum(lengths) - pauses[rows]
    last = np.minimum(places + sizes[group], 2 * (begins + sizes)[group]) - 1
    return Line(compact(rows), ends - seconds[rows], ends, ends, compact(places), compact(last))


def speaker_groups(corpus: Corpus) -> np.ndarray:
    """(N,) who may speak in one pack: one speaker, or those who have few utterances, in one
    language."""
    codes = np.array(corpus.speakers.codes)
    is_few = (np.bincount(codes) < FEW)[codes]
    codes = np.where(is_few, codes.max() + 1, codes)
    codes = codes * len(corpus.languages.names) + np.array(corpus.languages.codes)
    return np.unique(codes, return_inverse=True)[1]


@dataclass(frozen=True)
class Layout:
    """The packs of an epoch: arrays (N,) of the pack of each utterance."""

    line: Line
    place: np.ndarray  # its first utterance on the line
    stop: np.ndarray  # and its last one
    tokens: np.ndarray  # how many these have, as if with times
    start: np.ndarray  # where it begins there, in seconds
    end: np.ndarray  # and where it ends
    cut: np.ndarray  # whether it ends within the next utterance
    timed: np.ndarray
    previous: np.ndarray  # whether it has the text before it
    speed: np.ndarray  # by which it is played faster


@dataclass(frozen=True)
class Pack:
    """One pack, before it is played at `speed`."""

    rows: list[int]  # its utterances
    spans: list[tuple[float, float]]  # (start, end), seconds from its beginning
    seconds: float
    cut: bool  # the last utterance is not heard to its end
    timed: bool
    speed: float
    recorded: bool  # whether all of them are one part of a recording
    before: list[int]  # the utterances before it
    spans_before: list[tuple[float, float]]  # theirs, as times of a pack of their own


class Packs:
    """The packs of a training set.

    `tokens` (N,): of each text. `share`: of the packs that have times. `longest`: seconds of the
    longest pack. `room`: the most tokens of a pack. `speeds(epoch)` (N,): how much faster the
    pack of each utterance is played, 1 if it is None."""

    def __init__(
        self,
        corpus: Corpus,
        tokens: np.ndarray,
        share: float,
        seed: int,
        longest: float,
        room: int,
        speeds: Callable[[int], np.ndarray] | None = None,
    ):
        self.seconds_of = corpus.seconds
        self.costs = tokens + TIME_TOKENS
        self.share = share
        self.seed = seed
        self.longest = longest
        self.room = room
        self.speeds = speeds
        self.groups = speaker_groups(corpus)
        self.recordings = recordings(corpus)
        self.place = np.argsort(self.recordings.rows)
        self.has_next = (self.recordings.last > np.arange(len(corpus)))[self.place]
        line = self.recordings
        pauses = np.append(0.0, np.clip(line.starts[1:] - line.ends[:-1], 0.0, LONGEST_LEAD))
        pauses[line.first == np.arange(len(corpus))] = 0.0
        # The longest lead of each pack: silence, if the pack is not of a recording.
        self.leads = np.where(self.has_next, pauses[self.place], LONGEST_LEAD)

    def __len__(self) -> int:
        return len(self.costs)

    @functools.lru_cache(maxsize=2)  # noqa: B019  a run has one or two of these objects
    def layout(self, epoch: int) -> Layout:
        count = len(self)
        random = np.random.default_rng([self.seed, epoch, DRAW])
        length, timed, opens, previous, lead = random.random((5, count))
        line = drawn(self.groups, self.seconds_of, random)
        place = np.empty(count, dtype=np.int64)
        place[line.rows[::-1]] = np.arange(2 * count)[::-1]  # the first of two
        place = np.where(self.has_next, self.place, count + place)
        line = self.recordings.then(line)

        speed = np.ones(count)
        if self.speeds:
            speed = self.speeds(epoch).astype(float)
            speed[self.seconds_of > speed * self.longest] = 1.0
        timed = (timed < self.share) & (self.costs < self.room)
        alone = ~timed & (opens < ALONE)
        lead = self.leads * np.clip(1 - lead / LEADS, 0.0, None)
        lead = np.minimum(lead, np.clip(speed * self.longest - self.seconds_of, 0.0, None))
        lead[alone] = 0.0
        own = np.minimum((self.seconds_of + lead) / speed, self.longest)
        length = np.where(alone, 0.0, np.minimum(1, length / (1 - FULL)))
        length = own + (self.longest - own) * length
        start = line.starts[place] - lead
        reach = start + length * speed
        stop = np.searchsorted(line.heard, reach + ROUNDING, "right") - 1
        # One token is for the start of an utterance that is cut.
        costs = self.costs[line.rows]
        used = np.cumsum(costs)
        used_before = (used - costs)[place]
        by_tokens = np.searchsorted(used, used_before + self.room - 1, "right") - 1
        stop = np.minimum(np.minimum(stop, by_tokens), line.last[place])
        stop = np.maximum(stop, place)

        following = np.minimum(stop + 1, len(line.rows) - 1)
        is_open = timed & (opens < OPEN) & (stop < line.last[place])
        is_open &= reach < line.ends[following] - ROUNDING
        cut = is_open & (reach >= line.starts[following] + SHORTEST_CUT)
        end = np.where(cut, reach, np.minimum(reach, line.starts[following]))
        end = np.where(is_open, np.maximum(end, line.ends[stop]), line.ends[stop])
        end = np.minimum(end, start + self.longest * speed)
        tokens = used[stop] - used_before
        return Layout(line, place, stop, tokens, start, end, cut, timed, previous < PREVIOUS, speed)

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths of an epoch's packs as they are played."""
        layout = self.layout(epoch)
        return (layout.end - layout.start) / layout.speed

    def pack(self, index: int, epoch: int) -> Pack:
        """The pack that begins with utterance `index`."""
        layout = self.layout(epoch)
        line = layout.line
        place = int(layout.place[index])
        cut = bool(layout.cut[index])
        places = np.arange(place, int(layout.stop[index]) + 1 + cut)
        before = self.places_before(index, layout) if layout.previous[index] else places[:0]
        begin = line.starts[before[0]] if len(before) else 0.0
        return Pack(
            rows=line.rows[places].tolist(),
            spans=spans(line, places, layout.start[index]),
            seconds=float(layout.end[index] - layout.start[index]),
            cut=cut,
            timed=bool(layout.timed[index]),
            speed=float(layout.speed[index]),
            recorded=bool(self.has_next[index]),
            before=line.rows[before].tolist(),
            spans_before=spans(line, before, begin),
        )

    def places_before(self, index: int, layout: Layout) -> np.ndarray:
        """The places of the utterances before a pack, as many as another pack holds: those of
        the recording, or those of the drawn order that are not in the pack."""
        line = layout.line
        place = layout.place[index]
        first = line.first[place]
        if not self.has_next[index]:
            place = line.last[layout.place[index]] + 1  # where the utterance comes again
            first = layout.stop[index] + layout.cut[index] + 1
        reach = self.longest * min(1.0, layout.speed[index])
        earliest = np.searchsorted(line.starts, line.starts[place] - reach)
        return np.arange(max(earliest, first), place)


@dataclass(frozen=True)
class PackFlags:
    """Flags of packs of several utterances."""

    # fmt: off
    timestamp_share: float | None = flag(
        options.SHARE, None, "S",
        "train a released model on windows of several utterances, and this share of them with"
        " times, so that programs which read long recordings lose no text; 0: on single utterances"
        " (0.25 if utterances follow each other in their recordings, else 0)", TRAINS)


def add_arguments(parser, group) -> None:
    options.add_record(parser, group, PackFlags)
    parser.refuse((), NEEDS)


class PackedUtterances:
    """The packs that begin with each of `utterances`, as a data set beside these, of which a
    `share` has times; see `Packs`.

    `utterances` is a recipe's data set. It has `corpus`, `tokenizer`, its `augmentation` or None,
    the `longest` input in seconds, the `most_tokens` of the decoder's input, `encode(text)`,
    `lengths(seconds, epoch)`, and `example(...)`, which makes an item."""

    def __init__(
        self,
        utterances,
        share: float,
        seed: int = 0,
        speeds: Callable[[int], np.ndarray] | None = None,
    ):
        self.utterances = utterances
        corpus = utterances.corpus
        tokens = np.array([len(utterances.encode(text)) for text in corpus.texts])
        room = utterances.most_tokens - len(utterances.tokenizer.prompt)
        self.packs = Packs(corpus, tokens, share, seed, utterances.longest, room, speeds)

    def __len__(self) -> int:
        return len(self.utterances)

    def fingerprint(self) -> str:
        return self.utterances.fingerprint()

    def hours(self) -> float:
        return self.utterances.hours()

    def text_length(self, index: int) -> int:
        return int(self.packs.layout(0).tokens[index])

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return self.utterances.lengths(self.packs.seconds(epoch), epoch)

    def item(self, index: int, epoch: int) -> dict:
        """The pack that begins with an utterance, as `utterances.item`; "unscored" is how many
        labels at the beginning have no loss."""
        utterances = self.utterances
        corpus = utterances.corpus
        pack = self.packs.pack(index, epoch)
        waveform = change_speed(read(corpus, pack), pack.speed)
        waveform = waveform[: round(utterances.longest * SAMPLE_RATE)]
        lead = 0.0
        if utterances.augmentation:
            seconds = len(waveform) / SAMPLE_RATE
            lead = float(utterances.augmentation.ends(seconds, epoch, index)[0])
        before, prompt, tokens = self.written(pack, lead)
        rows = pack.rows[: len(pack.rows) - pack.cut]
        text = joined(corpus.texts[row] for row in rows)
        name = corpus.where(index)
        item = utterances.example(index, epoch, waveform, [*before, *prompt], tokens, text, name)
        item["language"] = corpus.languages[index]
        item["unscored"] = len(before)
        return item

    def written(self, pack: Pack, lead: float) -> tuple[list[int], list[int], list[int]]:
        """A pack as tokens: what was said before it, the prompt, and its text. `lead`: seconds of
        silence that were put in front. With times, each utterance is between the tokens of its
        start and its end; of one that the pack cuts, only the start is written, which tells a
        program where its next window begins."""
        utterances = self.utterances
        corpus = utterances.corpus
        tokenizer = utterances.tokenizer

        def write(rows: list[int], spans: list[tuple[float, float]], shift: float) -> list[int]:
            tokens = []
            for row, span in zip(rows, spans, strict=True):
                said = utterances.encode(corpus.texts[row])
                if pack.timed:
                    first, last = [tokenizer.time(at / pack.speed + shift) for at in span]
                    said = [first, *said, last]
                tokens += said
            return tokens

        whole = len(pack.rows) - pack.cut
        tokens = write(pack.rows[:whole], pack.spans[:whole], lead)
        if pack.cut:
            tokens.append(tokenizer.time(pack.spans[-1][0] / pack.speed + lead))
        prompt = tokenizer.timed_prompt if pack.timed else tokenizer.prompt
        prompt = tokenizer.in_language(prompt, corpus.languages[pack.rows[0]])
        most = min(PREVIOUS_TOKENS, utterances.most_tokens - len(prompt) - len(tokens) - 1)
        before = write(pack.before, pack.spans_before, 0.0)[-max(most, 1) :]
        if before and most > 0:
            before = [tokenizer.previous, *before]
        else:
            before = []
        return before, prompt, tokens


def spans(line: Line, places: np.ndarray, begin: float) -> list[tuple[float, float]]:
    """(start, end) at these places of one part of a line, in seconds from `begin` on. None begins
    before the one before it ends."""
    starts = np.maximum(
        line.starts[places], np.append(-np.inf, line.ends[places[:-1]])[: len(places)]
    )
    return list(zip((starts - begin).tolist(), (line.ends[places] - begin).tolist(), strict=True))


def read(corpus: Corpus, pack: Pack) -> torch.Tensor:
    """The waveform (T,) of a pack, before it is played at its speed. What a long pause of a
    recording holds besides silence is removed: it is speech without a text, or not speech."""
    samples = round(pack.seconds * SAMPLE_RATE)
    waveform = torch.zeros(samples)

    def put(part: torch.Tensor, start: float) -> None:
        first = round(start * SAMPLE_RATE)
        part = part[: samples - first]
        waveform[first : first + len(part)] = part

    lead, end = pack.spans[0]
    is_more = len(pack.rows) > 1 or lead > 0 or pack.seconds > end + ROUNDING
    if pack.recorded and is_more:
        first = pack.rows[0]
        offset = float(corpus.offsets[first]) - lead
        # Not through the cache of decoded audio: each epoch has other packs.
        place = replace(corpus.select([first]), offsets=[offset], durations=[pack.seconds])
        put(read_utterance(replace(place, cache_audio=None), 0, SAMPLE_RATE), 0.0)
        silence_loud_pauses(waveform, pack)
    else:
        for row, (start, _) in zip(pack.rows, pack.spans, strict=True):
            put(read_utterance(corpus, row, SAMPLE_RATE), start)
    return waveform


def silence_loud_pauses(waveform: torch.Tensor, pack: Pack) -> None:
    """Makes long pauses that are not quiet silent, in place, and what a pack begins with, because
    it may be part of one. An utterance may be missing there: one that was rejected, held out, or
    never transcribed. Heard without its text, it would teach the model to leave out text."""
    level = float(waveform.square().mean())
    ends = [end for _, end in pack.spans]
    starts = [start for start, _ in pack.spans]
    quiet = [(0.0, starts[0] - EDGE)]
    for end, start in zip(ends, [*starts[1:], pack.seconds], strict=True):
        if start - end > LONG_PAUSE:
            edge = min(EDGE, (start - end) / 4)
            quiet.append((end + edge, start - edge))
    for begin, end in quiet:
        middle = slice(round(begin * SAMPLE_RATE), max(0, round(end * SAMPLE_RATE)))
        if float(waveform[middle].square().mean()) > LOUD * level:  # not if it is empty: NaN
            waveform[middle] = 0.0
