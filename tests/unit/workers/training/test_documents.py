"""Documents of the recipe finetune: packing, what has a loss, and wrong lines and directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.orchestrator.api.v1alpha1.recipe import Finetune
from holdfast.orchestrator.errors import UserError
from holdfast.workers.training import documents, pretrained
from holdfast.workers.training.documents import IGNORED, Conversations, DataFile, Packed

END = 300


class Letters:
    """A tokenizer: the code of each letter."""

    eos_token_id, chat_template, words = END, None, "any"

    @property
    def backend_tokenizer(self) -> Letters:
        return self

    def to_str(self) -> str:
        return self.words

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "version", lambda name: "1")


class Ending(Letters):
    """One that appends its end, with a template that shortens earlier answers."""

    chat_template = "any"

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        ids = [ord(letter) for letter in text] + [END] * add_special_tokens
        return {"input_ids": ids, "offset_mapping": [(n, n + 1) for n in range(len(text))]}

    def apply_chat_template(self, messages: list[Any], tools: Any = None, **_: Any) -> str:
        texts = [one["content"] for one in messages]
        return (tools or "") + "".join([text[:1] for text in texts[:-1]] + texts[-1:])


def packed(
    tmp_path: Path, *lines: Any, length: int = 8, vocabulary: int = 400,
    tokenizer: Letters | None = None,
) -> Packed:  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )
    return Packed(
        DataFile(str(path), "data", tokenizer or Letters()), vocabulary, length, tmp_path / "kept"
    )


def test_the_end_that_a_tokenizer_appends_is_there_once(tmp_path: Path) -> None:
    line = {"prompt": "ab", "completion": "c"}
    made = packed(tmp_path, line, {"text": "de"}, tokenizer=Ending())
    assert made.read([0])[0][0].tolist() == [97, 98, 99, END, 100, 101, END, 0]


def test_a_line_without_a_token_is_rejected(tmp_path: Path) -> None:
    """The line's targets would be the next document's."""
    tokenizer = Letters()
    tokenizer.eos_token_id = None  # type: ignore[assignment]
    empty = {"prompt": "", "completion": ""}
    with pytest.raises(UserError, match=r"got line 2 of .* without a token; expected some"):
        packed(tmp_path, {"text": "ab"}, empty, tokenizer=tokenizer)


def test_answers_that_a_template_changes_are_counted_and_tools_are_passed(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in
            (("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "dd"))]  # fmt: skip
    made = packed(tmp_path, {"messages": said, "tools": "T"}, tokenizer=Ending())
    assert made.num_silent == 1
    assert made.read([0])[0][0, :6].tolist() == [ord(one) for one in "Tabcdd"]
    assert made.num_targets == [2]


def test_documents_are_packed_whole_and_only_completions_have_a_loss(tmp_path: Path) -> None:
    made = packed(
        tmp_path,
        {"prompt": "ab", "completion": "c"},
        {"text": "de"},
        "",
        {"text": "fgh"},
        {"prompt": "x" * 7, "completion": "yz"},
    )
    inputs, targets, positions = made.read([0, 1, 2])
    a, b, c, d, e = (ord(letter) for letter in "abcde")
    none = IGNORED
    assert inputs[0].tolist() == [a, b, c, END, d, e, END, 0]
    assert targets[0].tolist() == [none, c, END, none, e, END, none, none]
    assert positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert positions[1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3], "padding is a document"
    assert (made.num_targets, made.num_cut, len(made)) == ([4, 3, 1], 1, 3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"text": "a"}, '{"text": '],
            "got line 2 of .*data.jsonl: .*Expecting value.*; expected a",
        ),
        (
            [{"question": "a"}],
            'got line 1 of .*: {"question": "a"}; expected a JSON object with pro',
        ),
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            "has no chat template; expected chat_",
        ),
        ([], "got no lines in .*; expected a JSON object"),
        ([{"prompt": "a" * 9, "completion": "b"}], "got no completion within 8 tokens"),
        ([{"text": "\u2603"}], "with the token 9731 and a model with 400 tokens; expected a tok"),
    ],
    ids=["broken", "other keys", "no template", "empty", "long prompts", "tokenizer"],
)
def test_wrong_lines_are_rejected(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        packed(tmp_path, *lines)


def test_a_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No such file.*expected a JSONL file in UTF-8"):
        Packed(DataFile(str(tmp_path / "none"), "data", Letters()), 400, 8, tmp_path)


def test_a_directory_without_all_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config.json; expected a directory as save_pre"):
        pretrained.expect_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"without model.safetensors; .*; download it again"):
        pretrained.expect_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"convert the .bin files"):
        pretrained.expect_weights(tmp_path)
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / pretrained.INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(UserError, match=r"without model-2.safetensors"):
        pretrained.expect_weights(tmp_path)


class Counting(Ending):
    lines = 0

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        self.lines += 1
        return super().__call__(text, **options)


def test_a_second_start_makes_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "abc"}\n{"prompt": "d", "completion": "efgh"}\n')
    first, second, other = Counting(), Counting(), Counting()
    other.words = "changed"

    def made(tokenizer: Counting, cache: Path = tmp_path / "kept") -> list[Any]:
        kept = Packed(DataFile(str(path), "data", tokenizer), 400, 4, cache)
        return [kept.num_cut, *(one.tolist() for one in kept.read([*range(len(kept))]))]

    whole = made(Counting(), tmp_path / "other")
    assert made(first) == made(second) == made(other) == whole
    assert (first.lines, second.lines, other.lines) == (3, 0, 3)
    path.write_text('{"text": "xyz"}\n')
    assert made(second) != whole
    (tmp_path / "file").touch()
    made(second, tmp_path / "file" / "below")  # cannot be made
    assert second.lines == 2
    place, third, fourth = tmp_path / "kept" / "data.npz", Counting(), Counting()
    place.write_bytes(place.read_bytes()[:-30])  # lost with the machine
    assert made(third) == made(fourth) == made(Counting(), tmp_path / "another")
    assert (third.lines, fourth.lines) == (1, 0)


def test_making_tokens_is_a_sign_of_life(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}\n' * 2000)
    config, ticks = Finetune(model="m", data="data.jsonl", output="out"), list[int]()
    Conversations(config, str(tmp_path), Counting(), 400, lambda: ticks.append(1))
    assert len(ticks) == 2
    names = {path.name for path in (tmp_path / "out.tokens").iterdir()}
    assert names == {"data.npz", "lock"}


def test_a_model_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "SHARD_BYTES", 100)
    taken = []

    def values() -> Iterator[tuple[str, Tensor]]:
        for number, size in enumerate((10, 10, 30, 2)):
            taken.append(len([*(tmp_path / "model").glob("*.part")]))
            yield str(number), torch.full((size,), float(number))

    pretrained.write(values(), tmp_path / "model")
    assert taken == [0, 0, 0, 1]  # parts on disk when a value is made
    index = json.loads((tmp_path / "model" / pretrained.INDEX).read_text())
    assert index["metadata"] == {"total_size": 208}
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 1, 2, 3)]
    assert index["weight_map"] == dict(zip("0123", names, strict=True))
    for name, file in index["weight_map"].items():
        assert set(load_file(tmp_path / "model" / file)[name].tolist()) == {float(name)}
    monkeypatch.setattr(pretrained, "SHARD_BYTES", 10**9)
    pretrained.write(values(), tmp_path / "whole")
    assert [one.name for one in (tmp_path / "whole").iterdir()] == ["model.safetensors"]
