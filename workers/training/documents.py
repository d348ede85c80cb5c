"""Documents of a JSONL file as packed samples, for fine-tuning.

A sample has whole documents, each with positions from 0, so that attention stays inside documents.
Only completions have a loss: the prompt, the padding and the first token of a document have none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.orchestrator.api.v1alpha1.recipe import Finetune
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import files
from holdfast.workers.session.order import sample_ids

CONFIG = "spec.entrypoint.recipe.config"
IGNORED = -100
"""Next token without a loss, as torch's cross entropy has it."""
EXPECTED = "a JSON object with prompt and completion, with messages, or with text"
DAY = date(2024, 7, 26)  # the default of Llama 3's template
UNREADABLE = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile)
FORMAT = 1
"""Number of the files of tokens; another one where the same lines give other tokens."""
Numbers = npt.NDArray[np.int64]


class Document(NamedTuple):
    tokens: list[int]
    trained: list[bool]
    """True for each token with a loss."""
    num_silent: int = 0
    """Answers of the assistant that have none, as the chat template changes them."""


class DataFile(NamedTuple):
    path: str
    field: str
    tokenizer: Any
    tick: Callable[[], None] = lambda: None
    """Called while tokens are made."""


class Packed:
    """The documents of a file, in its order, in samples of at most `length` tokens."""

    def __init__(self, source: DataFile, vocab_size: int, length: int, cache: Path) -> None:
        """Tokens are kept in the directory `cache`. Raises UserError for a line that is not a
        document, and for tokens that the model does not have."""
        path, field, *_ = source
        self.length = length
        self._samples: list[tuple[int, int]] = []
        """Documents of each sample: the first, and the one after the last."""
        first = room = 0
        ids, trained, sizes, silent = _tokens_of(source, cache)
        self.num_silent = int(silent.sum())
        if not len(sizes):
            raise UserError(f"{field}: got no lines in {path}; expected {EXPECTED} on each")
        kept = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes) < length
        self.num_cut, sizes = int((sizes > length).sum()), np.minimum(sizes, length)
        self._tokens: Numbers = ids[kept].astype(np.int64)
        if (largest := self._tokens.max()) >= vocab_size:
            raise UserError(
                f"{CONFIG}.model: got a tokenizer with the token {largest} and a model with "
                f"{vocab_size} tokens; expected a tokenizer of this model; copy the one that "
                "was published with it into the directory"
            )
        for number, size in enumerate(sizes.tolist()):
            if number and size > room:
                self._samples.append((first, number))
                first, room = number, length
            room = (room or length) - size
        self._begins = [0, *np.cumsum(sizes).tolist()]
        own = np.where(trained[kept], self._tokens, IGNORED)
        self._targets: Numbers = np.append(own[1:], IGNORED)
        self._targets[np.cumsum(sizes) - 1] = IGNORED
        self._samples.append((first, len(sizes)))
        self.num_targets = [
            int((self._targets[self._begins[low] : self._begins[high]] != IGNORED).sum())
            for low, high in self._samples
        ]
        """Tokens of each sample that have a loss."""
        if not any(self.num_targets):
            raise UserError(
                f"{field}: got no completion within {length} tokens in {path}; expected some; "
                "raise sequenceLength"
            )

    def __len__(self) -> int:
        return len(self._samples)

    def losses(self) -> str:
        """Text about what was left out, for the first line of the log."""
        cut = f", {self.num_cut} documents cut" if self.num_cut else ""
        silent = f"{self.num_silent} answers without a loss: the chat template changes them"
        return f"{cut}, {silent}" if self.num_silent else cut

    def read(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, next tokens and positions (B, T) of these samples. Padding is a document."""
        shape = len(ids), self.length
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, sample in enumerate(ids):
            low, high = self._samples[sample]
            at = 0
            for number in range(low, high):
                begin, end = self._begins[number], self._begins[number + 1]
                place = slice(at, at + end - begin)
                inputs[row, place] = self._tokens[begin:end]
                targets[row, place] = self._targets[begin:end]
                positions[row, place] = np.arange(end - begin)
                at += end - begin
            positions[row, at:] = np.arange(self.length - at)
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(positions)


class Conversations:
    """The samples of the recipe finetune, in their order."""

    def __init__(
        self, config: Finetune, directory: str, tokenizer: Any, vocab_size: int,
        tick: Callable[[], None],
    ) -> None:  # fmt: skip
        def packed(name: str, path: str) -> Packed:
            place = str(files.resolve(directory, path))
            source = DataFile(place, f"{CONFIG}.{name}", tokenizer, tick)
            return Packed(source, vocab_size, config.sequence_length, cache)

        output = files.resolve(directory, config.output)
        cache = output.with_name(f"{output.name}.tokens")
        self.train = packed("data", config.data)
        self.validation: Any = ()
        if config.validation is not None:
            self.validation = packed("validation", config.validation)
        self.num_evaluated = len(self.validation)
        self._seed, self.end = config.seed, len(self.train) * config.epochs
        if config.steps is not None:
            self.end = config.steps * config.global_batch
        self.steps = -(-self.end // config.global_batch)

    def batch(self, indices: tuple[int, ...]) -> tuple[Tensor, ...]:
        return self.train.read(sample_ids(indices, len(self.train), self._seed))

    def validation_batch(self, indices: tuple[int, ...]) -> tuple[Tensor, ...]:
        return self.validation.read(indices)  # type: ignore[no-any-return]

    def num_targets(self, indices: Sequence[int], evaluation: bool = False) -> int:
        if evaluation:
            return sum(self.validation.num_targets[index] for index in indices)
        ids = sample_ids(tuple(indices), len(self.train), self._seed)
        return sum(self.train.num_targets[number] for number in ids)


def _tokens_of(source: DataFile, cache: Path) -> list[Any]:
    """Tokens of all documents, which have a loss, the size of each document, and its silent
    answers. A directory keeps them for the next start, with a hash of all that they depend on; the
    first rank that comes makes them."""
    tokenizer = source.tokenizer
    parts = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.eos_token_id)
    key = hashlib.sha256(repr((FORMAT, version("transformers"), parts)).encode())
    try:
        with open(source.path, "rb") as lines:  # noqa: PTH123
            while block := lines.read(2**20):
                key.update(block)
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            place = cache / f"{source.field.rpartition('.')[2]}.npz"
            with contextlib.suppress(*UNREADABLE), np.load(place) as stored:
                if stored["key"] == key.hexdigest():
                    return [stored[f"arr_{number}"] for number in range(4)]
            arrays = _tokenize(source)
            with contextlib.suppress(OSError):  # a full disk
                np.savez(cache / "part.npz", *arrays, key=key.hexdigest())
                (cache / "part.npz").replace(place)
            return arrays
    except OSError:  # no such directory can be made, or no locks
        return _tokenize(source)


def _tokenize(source: DataFile) -> list[Any]:
    documents = [*_documents(source)]
    return [
        np.array([token for d in documents for token in d.tokens], np.int32),
        np.array([has for d in documents for has in d.trained], np.bool_),
        np.array([len(d.tokens) for d in documents], np.int64),
        np.array([d.num_silent for d in documents], np.int64),
    ]


def _documents(source: DataFile) -> Iterator[Document]:
    path, field, tokenizer, tick = source
    try:
        with open(path, encoding="utf-8") as lines:  # noqa: PTH123
            for number, line in enumerate(lines, 1):
                if number % 1000 == 0:
                    tick()
                if line.strip():
                    got = f"{field}: got line {number} of {path}"
                    document = _document(line, got, tokenizer)
                    if not document.tokens:
                        raise UserError(f"{got} without a token; expected some; remove the line")
                    yield document
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{field}: got {path} ({error}); expected a JSONL file in UTF-8") from None


def _document(line: str, got: str, tokenizer: Any) -> Document:
    shown = line.strip() if len(line) < 60 else f"{line[:57]}..."
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{got}: {shown} ({error}); expected {EXPECTED}; correct the line"
        ) from None
    match value:
        case {"messages": [_, *_] as messages}:
            return _conversation(messages, value.get("tools"), f"{got}: {shown}", tokenizer)
        case {"prompt": str(prompt), "completion": str(completion)}:
            before, after = (
                _tokens(prompt, tokenizer),
                _tokens(completion, tokenizer, special=False),
            )
            return _ended(before, after, tokenizer)
        case {"text": str(text)} if text:
            return _ended([], _tokens(text, tokenizer), tokenizer)
    raise UserError(f"{got}: {shown}; expected {EXPECTED}; correct the line")


def _tokens(text: str, tokenizer: Any, *, special: bool = True) -> list[int]:
    """Tokens without an end, which some tokenizers append."""
    tokens: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    while special and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
    return tokens


def _ended(before: list[int], after: list[int], tokenizer: Any) -> Document:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    trained = [False] * len(before) + [True] * len([*after, *end])
    return Document([*before, *after, *end], trained)


def _conversation(messages: list[Any], tools: Any, got: str, tokenizer: Any) -> Document:
    """Tokens by the chat template; what the assistant says has a loss."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{got}: messages, while the tokenizer has no chat template; expected "
            "chat_template.jinja in the model's directory; add it, or write prompt and completion"
        )
    try:
        # Some templates have the day in them: tokens must not depend on it.
        template = partial(
            tokenizer.apply_chat_template, tools=tools, tokenize=False, strftime_now=DAY.strftime
        )
        text = template(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = template(messages[:number], add_generation_prompt=True)
                after = template(messages[: number + 1])
                if text.startswith(before) and text.startswith(after):
                    spans.append((len(before), len(after)))
    except Exception as error:  # jinja2 and the templates raise their own
        raise UserError(
            f"{got} ({error}); expected messages with role and content that the chat template "
            "takes; correct the line"
        ) from None
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if not spans:
        what = "the chat template changes every answer" if num_answers else "no assistant answers"
        raise UserError(
            f"{got}: {what}; expected an answer of the assistant; add it, or write prompt and "
            "completion"
        )
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [
        any(low <= begin < high for low, high in spans) for begin, _ in whole["offset_mapping"]
    ]
    return Document(whole["input_ids"], trained, num_answers - len(spans))
