"""The catalogue's files, a user's file over them, names, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.orchestrator.catalogue import load
from holdfast.orchestrator.catalogue.entries import FORMATS
from holdfast.orchestrator.catalogue.load import (
    FILE_VARIABLE,
    Catalogue,
    CatalogueError,
    UnknownEntry,
    load_catalogue,
    parse_devices,
)
from holdfast.orchestrator.errors import UserError

DEVICE = """\
devices:
  X1:
    memory: 60GiB
    flops: {bfloat16: 500TFLOP/s}
    memory_bandwidth: 2TB/s
    link: nvlink4
    host_bandwidth: 25GB/s
"""


@pytest.fixture(autouse=True)
def no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def catalogue() -> Catalogue:
    return load_catalogue()


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return file


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(CatalogueError) as raised:
        load_catalogue(write(tmp_path, text))
    assert raised.value.exit_code == 2
    return str(raised.value)


# -- what Holdfast brings ----------------------------------------------------------------------
def test_every_device_is_complete_and_its_figures_are_of_the_right_order(
    catalogue: Catalogue,
) -> None:
    for name, device in catalogue.devices.items():
        assert 10e9 < device.memory_bytes < 300e9, name
        assert {"float32", "float16"} <= set(device.flops) <= set(FORMATS), name
        assert all(10e12 < peak < 10e15 for peak in device.flops.values()), name
        assert device.flops["float16"] > device.flops["float32"], name
        assert 100e9 < device.memory_bandwidth < 10e12, name
        assert 10e9 < device.host_bandwidth < 500e9, name
        assert device.source and catalogue.link(device.link), name


def test_float8_is_twice_as_fast_as_bfloat16_and_not_the_figure_with_sparsity(
    catalogue: Catalogue,
) -> None:
    for device in catalogue.devices.values():
        if "float8" in device.flops:
            assert device.flops["float8"] / device.flops["bfloat16"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("A100", 312), ("H100 SXM", 989), ("H100 PCIe", 756), ("H100 NVL", 835), ("H200", 989),
     ("B200", 2250), ("L40S", 362)],
)  # fmt: skip
def test_peaks_are_those_by_which_torchtitan_computes_mfu(
    catalogue: Catalogue, name: str, teraflops: float
) -> None:
    assert catalogue.device(name).flops["bfloat16"] == teraflops * 1e12


@pytest.mark.parametrize(
    ("name", "price"),
    [("RTX 4000 Ada", 0.76), ("RTX 6000 Ada", 1.57), ("L40S", 1.57), ("MI300X", 1.99),
     ("H100-80", 3.39)],
)  # fmt: skip
def test_prices_are_those_of_the_founding_document_with_a_date(
    catalogue: Catalogue, name: str, price: float
) -> None:
    found = catalogue.device(name).price
    assert found is not None and found.per_hour == price
    assert found.date == "2026-11-25" and "founding document" in found.source


@pytest.mark.parametrize("name", ["A100-40", "A100-80", "H100 PCIe", "H200", "B200", "RTX 4090"])
def test_prices_that_the_document_lacks_name_who_asked_for_them_and_when(
    catalogue: Catalogue, name: str
) -> None:
    found = catalogue.device(name).price
    assert found is not None and 0.1 < found.per_hour < 10
    assert found.date >= "2026-09-01"
    assert any(who in found.source for who in ("RunPod", "Lambda", "OpenRelay"))


def test_a_device_without_a_source_for_its_price_has_none(catalogue: Catalogue) -> None:
    assert catalogue.device("V100-32").price is None


def test_links_are_below_the_line_rate_of_one_direction(catalogue: Catalogue) -> None:
    line_rates = {"nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9, "infinity-fabric": 448e9,
                  "pcie4": 31.5e9, "pcie5": 63e9, "infiniband-200": 25e9, "infiniband-400": 50e9,
                  "ethernet-100": 12.5e9, "ethernet-25": 3.125e9,
                  "ethernet-10": 1.25e9}  # fmt: skip
    for name, line_rate in line_rates.items():
        link = catalogue.link(name)
        assert 0.6 * line_rate < link.bandwidth < line_rate, name
        assert 1e-6 < link.latency < 1e-4, name
        assert link.shared is name.startswith("ethernet"), name


# -- names -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "name"),
    [("h100-80", "H100-80"), ("H100", "H100-80"), (" h100_sxm ", "H100-80"), ("4090", "RTX-4090"),
     ("NVIDIA H100 80GB HBM3", "H100-80"), ("NVIDIA A100-SXM4-40GB", "A100-40")],
)  # fmt: skip
def test_a_device_is_found_by_any_of_its_names(
    catalogue: Catalogue, written: str, name: str
) -> None:
    assert catalogue.device(written).name == name


@pytest.mark.parametrize(
    ("reported", "name"),
    [("NVIDIA H100 80GB HBM3", "H100-80"), ("NVIDIA H100 80GB HBM2e", "H100-80"),
     ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA H100 NVL", "H100-NVL"), ("NVIDIA H200", "H200"),
     ("NVIDIA B200", "B200"), ("NVIDIA GB200", "GB200"), ("NVIDIA GH200 144G HBM3e", "GH200"),
     ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA A100-SXM-64GB", "A100-80"),
     ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"), ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"),
     ("NVIDIA A10G", "A10G"), ("NVIDIA A10", "A10"), ("Tesla V100-SXM2-16GB", "V100-16"),
     ("Tesla V100-PCIE-32GB", "V100-32"), ("AMD Instinct MI300X VF", "MI300X"),
     ("AMD Instinct MI250X", "MI250X"), ("NVIDIA GeForce RTX 4090", "RTX-4090"),
     ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
     ("NVIDIA RTX 4000 Ada Generation", "RTX-4000-Ada")],
)  # fmt: skip
def test_a_name_that_a_driver_reports_finds_its_device(
    catalogue: Catalogue, reported: str, name: str
) -> None:
    found = catalogue.reported(reported)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "reported",
    ["Quadro RTX 6000", "NVIDIA L40", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Apple M3", ""],
)
def test_a_device_that_is_not_known_is_not_taken_for_another(
    catalogue: Catalogue, reported: str
) -> None:
    assert catalogue.reported(reported) is None


def test_an_unknown_name_is_refused_with_the_nearest(catalogue: Catalogue) -> None:
    with pytest.raises(UnknownEntry, match=r"device: got 'H10-80'; .* nearest: H100-80"):
        catalogue.device("H10-80")
    with pytest.raises(UnknownEntry, match=r"link: got 'nvlink9'; .*nvlink"):
        catalogue.link("nvlink9")
    with pytest.raises(UnknownEntry, match=r"architecture: got 'lama3-8b'; .* nearest: llama3-8b"):
        catalogue.architecture("lama3-8b")
    with pytest.raises(UnknownEntry, match=r"got 'zzz'; expected one of .*A100-40.*H100-80"):
        catalogue.device("zzz")


def test_a_model_is_found_by_its_name_on_the_hub(catalogue: Catalogue) -> None:
    assert catalogue.architecture("Qwen/Qwen3-8B").name == "qwen3-8b"
    assert catalogue.architecture("meta-llama/Llama-3.1-8B").name == "llama3-8b"


# -- 64xH100-80 --------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["64xH100-80", "64 x h100", "64XH100", "64*H100-SXM"])
def test_devices_are_a_number_and_a_kind(catalogue: Catalogue, text: str) -> None:
    count, device = parse_devices(text, catalogue)
    assert (count, device.name) == (64, "H100-80")


@pytest.mark.parametrize(
    ("text", "words"),
    [("64", "expected devices, as COUNTxDEVICE such as 64xH100-80; write 64xH100-80"),
     ("xH200", "write 1xH200"), ("H200", "write 1xH200"), ("8H200", "write 8xH200"),
     ("8x", "write 8xH100-80"), ("", "expected devices, as COUNTxDEVICE"),
     ("-8xH100", "expected devices, as COUNTxDEVICE"),
     ("2.5xH100", "expected devices, as COUNTxDEVICE"),
     ("0xH100", "expected one device or more; write 1xH100"),
     ("8xH1000", "got 'H1000'; expected a name of the catalogue; the nearest: H100")],
)  # fmt: skip
def test_devices_that_cannot_be_read_are_refused(
    catalogue: Catalogue, text: str, words: str
) -> None:
    with pytest.raises(UserError) as raised:
        parse_devices(text, catalogue)
    assert words in str(raised.value) and raised.value.exit_code == 2


# -- a user's file -----------------------------------------------------------------------------
def test_a_file_of_the_user_adds_a_device_with_a_link_of_its_own(tmp_path: Path) -> None:
    text = DEVICE.replace("nvlink4", "mylink")
    text += "links:\n  mylink: {bandwidth: 300GB/s, latency: 4us}\n"
    found = load_catalogue(write(tmp_path, text))
    device = found.device("x1")
    assert (device.memory_bytes, device.per_node) == (60 * 2**30, 8)
    assert found.link(device.link).bandwidth == 300e9
    assert found.file.endswith("mine.yaml") and found.device("H100")


def test_the_example_of_the_page_is_a_catalogue(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs/user/catalogue.md"
    match = re.search(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    found = load_catalogue(write(tmp_path, match[1]))
    assert found.device("NVIDIA RTX A6000").link == "lab-bridge"
    assert found.architecture("lab-1b").tied_embeddings


def test_a_file_of_the_user_replaces_single_fields_of_an_entry(tmp_path: Path) -> None:
    text = "devices:\n  h100:\n    price: {per_hour: 2.10USD/h, date: 2026-10-01}\n"
    mine, usual = load_catalogue(write(tmp_path, text)), load_catalogue()
    device = mine.device("H100-80")
    assert device.price is not None
    assert (device.price.per_hour, device.price.date) == (2.10, "2026-10-01")
    assert device.flops == usual.device("H100-80").flops
    assert set(mine.devices) == set(usual.devices), "h100 is an alias, not a new device"


def test_a_file_of_the_user_adds_an_architecture(tmp_path: Path) -> None:
    text = (
        "architectures:\n  mine: {vocab_size: 100, dim: 64, num_layers: 2, num_heads: 4,"
        " num_kv_heads: 2, head_dim: 16, ffn_dim: 256, tied_embeddings: true, aliases: [my/one]}\n"
    )
    found = load_catalogue(write(tmp_path, text)).architecture("My/One")
    assert found.name == "mine" and found.tied_embeddings and found.gated_ffn


def test_the_file_comes_from_the_argument_the_variable_or_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ".config/holdfast/catalogue.yaml"
    home.parent.mkdir(parents=True)
    home.write_text(DEVICE.replace("X1", "home"))
    assert "home" in load_catalogue().devices
    named = tmp_path / "named.yaml"
    named.write_text(DEVICE.replace("X1", "named"))
    monkeypatch.setenv(FILE_VARIABLE, str(named))
    assert {"named"} == set(load_catalogue().devices) & {"home", "named"}
    argument = write(tmp_path, DEVICE.replace("X1", "argument"))
    found = set(load_catalogue(argument).devices) & {"home", "named", "argument"}
    assert found == {"argument"}


def test_a_file_that_is_not_there_is_refused_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match=rf"none.yaml .*No such file.*correct {FILE_VARIABLE}"):
        load_catalogue()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("60GiB", "60", "devices.X1.memory: got 60 without a unit; expected a size with its unit"),
        ("60GiB", "60", "write 60GiB"),
        ("60GiB", "60GB/s", "devices.X1.memory: got 60GB/s; expected a size with its unit"),
        ("2TB/s", "2TB", "devices.X1.memory_bandwidth: got 2TB; expected a bandwidth"),
        ("500TFLOP/s", "500", "devices.X1.flops.bfloat16: got 500 without a unit"),
        ("bfloat16", "bf16", "devices.X1.flops: got the unknown field 'bf16'; expected one of"),
        ("{bfloat16: 500TFLOP/s}", "{}", "devices.X1.flops: got no format; expected at least"),
        ("{bfloat16: 500TFLOP/s}", "500TFLOP/s", "devices.X1.flops: got '500TFLOP/s'"),
        ("memory:", "memroy:", "the unknown field 'memroy'; expected one of aliases, memory,"),
        ("memory:", "memroy:", "did you mean memory?"),
        ("    link: nvlink4\n", "", "devices.X1: got no link; expected all required fields"),
        ("nvlink4", "nvlink9", "devices.X1.link: got nvlink9; expected a link of the catalogue"),
        ("nvlink4", "[a]", "devices.X1.link: got ['a']; expected a text"),
        ("X1:", "7:", "devices.7: got 7; expected a text as name"),
        ("X1:", "X1: [1]\n  Y1:", "devices.X1: got [1]; expected fields with values"),
        ("devices:", "device:", "got the unknown section 'device'; expected one of devices"),
        ("link:", "per_node: 0\n    link:", "devices.X1.per_node: got 0; expected a whole number"),
        ("link:", "aliases: [H100]\n    link:", "devices.X1.aliases: got H100, which is H100-80"),
        ("link:", "aliases: X\n    link:", "devices.X1.aliases: got 'X'; expected a list of names"),
        ("link:", "aliases: [7]\n    link:", 'aliases[0]: got 7; expected a text; write "7"'),
        ("link:", "price: 3\n    link:", "devices.X1.price: got 3; expected fields with values"),
        ("link:", "price: {per_hour: 3USD/h}\n    link:", "devices.X1.price: got no date"),
        ("link:", "price: {per_hour: 3, date: soon}\n    link:", "price.date: got 'soon'; exp"),
        ("link:", "price: {per_hour: 3, date: soon}\n    link:", "price.per_hour: got 3 without"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused_by_file_entry_and_field(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in DEVICE
    message = refused(tmp_path, DEVICE.replace(old, new))
    assert str(tmp_path / "mine.yaml") in message and words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "catalogue: got None; expected entries below devices, links, architectures"),
        ("[1]", "catalogue: got [1]; expected entries"),
        ("devices:", "devices: got None; expected entries, each a name with fields"),
        ("devices: {a: [}", "expected YAML with devices, links or architectures"),
        (3000 * "[", "expected YAML with devices, links or architectures"),
        ("links: {a: {bandwidth: 1GB/s}}", "links.a: got no latency"),
        ("links: {lo: {shared: 2}}", "links.lo.shared: got 2; expected true or false"),
        ("architectures: {mistral-7b: {dim: 4kB}}", "mistral-7b.dim: got '4kB'; expected a whole"),
        ("architectures: {mistral-7b: {num_kv_heads: 5}}", "num_kv_heads: got 5 with num_heads 32"),
        ("architectures: {mistral-7b: {gated_ffn: 1}}", "gated_ffn: got 1; expected true or false"),
    ],
)
def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, text)


def test_all_problems_of_a_file_are_in_one_message(tmp_path: Path) -> None:
    message = refused(tmp_path, DEVICE.replace("60GiB", "60").replace("2TB/s", "2"))
    assert "2 problems" in message and "memory:" in message and "memory_bandwidth:" in message


def test_a_process_that_only_shows_numbers_lives_with_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(write(tmp_path, "devices: 3")))
    load.catalogue_or_built_in.cache_clear()
    try:
        found = load.catalogue_or_built_in().reported("NVIDIA H200")
        assert found is not None and found.name == "H200"
        assert "devices: got 3" in caplog.text
    finally:
        load.catalogue_or_built_in.cache_clear()


@pytest.mark.parametrize("field", ["sustained", "matmul_share", "attention_share"])
@pytest.mark.parametrize("written", ["0", "1.2", "-0.5", "true", "500W"])
def test_a_share_of_a_peak_is_above_zero_and_up_to_one(
    field: str, written: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, f"{DEVICE}    {field}: {written}\n")
    assert f"devices.X1.{field}" in message and "a share above 0 and up to 1" in message


def test_a_device_sustains_its_peak_where_nothing_else_is_written(tmp_path: Path) -> None:
    for more, share in (("", 1.0), ("    sustained: 0.8\n", 0.8)):
        made = load_catalogue(write(tmp_path, DEVICE + more))
        assert made.device("X1").sustained == pytest.approx(share)
