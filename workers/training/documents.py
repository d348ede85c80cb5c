"""Documents of a JSONL file as packed samples, for fine-tuning.

A sample has whole documents, each with positions from 0, so that attention stays inside documents.
Only completions have a loss: the prompt, the padding and the first token of a document have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
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
Numbers = npt.NDArray[np.int64]


class Document(NamedTuple):
    tokens: list[int]
    trained: list[bool]
    """True for each token with a loss."""
    num_silent: int = 0
    """Answers of the assistant that have none, as the chat template changes them."""


class Packed:
    """The documents of a file, in its order, in samples of at most `length` tokens."""

    def __init__(self, path: str, field: str, tokenizer: Any, vocab_size: int, length: int) -> None:
        """Raises UserError for a line that is not a document, and for tokens that the model does
        not have."""
        self.length = length
        self._samples: list[tuple[int, int]] = []
        """Documents of each sample: the first, and the one after the last."""
        self.num_cut = self.num_silent = first = room = 0
        documents = _documents(path, field, tokenizer)
        tokens, targets, begins = [], [], [0]
        for number, (ids, trained, num_silent) in enumerate(documents):
            self.num_silent += num_silent
            self.num_cut += len(ids) > length
            ids, trained = ids[:length], trained[:length]
            if max(ids, default=0) >= vocab_size:
                raise UserError(
                    f"{CONFIG}.model: got a tokenizer with the token {max(ids)} and a model with "
                    f"{vocab_size} tokens; expected a tokenizer of this model; copy the one that "
                    "was published with it into the directory"
                )
            if number and len(ids) > room:
                self._samples.append((first, number))
                first, room = number, length
            room = (room or length) - len(ids)
            tokens.append(np.array(ids))
            after = [one if has else IGNORED for one, has in zip(ids, trained, strict=True)]
            targets.append(np.array([*after[1:], IGNORED]))
            begins.append(begins[-1] + len(ids))
        if not tokens:
            raise UserError(f"{field}: got no lines in {path}; expected {EXPECTED} on each")
        self._samples.append((first, len(tokens)))
        self._tokens: Numbers = np.concatenate(tokens)
        self._targets: Numbers = np.concatenate(targets)
        self._begins = begins
        self.num_targets = [
            int((self._targets[begins[low] : begins[high]] != IGNORED).sum())
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
        """What was left out, for the first line of the log."""
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

    def __init__(self, config: Finetune, directory: str, tokenizer: Any, vocab_size: int) -> None:
        def packed(name: str, path: str) -> Packed:
            place = str(files.resolve(directory, path))
            return Packed(place, f"{CONFIG}.{name}", tokenizer, vocab_size, config.sequence_length)

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
        return sum(self.train.num_targets[one] for one in ids)


def _documents(path: str, field: str, tokenizer: Any) -> Iterator[Document]:
    try:
        with open(path, encoding="utf-8") as lines:  # noqa: PTH123
            for number, line in enumerate(lines, 1):
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
    found: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    while special and found and found[-1] == tokenizer.eos_token_id:
        found.pop()
    return found


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
        template = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
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
