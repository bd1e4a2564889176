"""Restore: chunks are read once, memory is bounded, and the public way to place arrays works too."""

import collections
import errno
import http.server
import os
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck
from ckpt_jax import _ocdbt, _place, _reading, _storage
from tests.trees import same

W = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)


@pytest.fixture
def mesh8() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("x",))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(P("x"), P(None, "x")), (P(None, "x"), P("x")), (P("x"), P()), (P(), P("x")), (P("x"), P("x"))],
    ids=str,
)
@pytest.mark.parametrize("root", ["files", "store"])
def test_each_chunk_is_read_once(tmp_path, memory, mesh8, monkeypatch, saved, wanted, root):  # noqa: PLR0917
    """However the target cuts it: saved by rows in 8 and restored by columns in 8, 1.0 reads a chunk."""
    path = tmp_path / "1" if root == "files" else memory
    manifest = ck.save(path, {"w": jax.device_put(W, NamedSharding(mesh8, saved))})
    reads: collections.Counter[object] = collections.Counter()

    class Counting:
        def __init__(self, store):
            self.store = store

        def read(self, key):
            reads[key] += 1
            return self.store.read(key)

    def counting(place, name, start, buffer):
        reads[name, start] += 1
        return read_into(place, name, start, buffer)

    open_store, read_into = _reading.open_store, _storage.Folder.read_into
    monkeypatch.setattr(_reading, "open_store", lambda place: Counting(open_store(place)))
    monkeypatch.setattr(_storage.Folder, "read_into", counting)
    like = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh8, wanted))}
    np.testing.assert_array_equal(ck.restore(path, like)["w"], W)
    assert len(reads) == manifest.leaves["w"].chunks == sum(reads.values())


def test_another_source_is_asked_where_one_fails(tmp_path):
    """A chunk counts from wherever it comes, if its digest is the manifest's."""
    tree = {"w": W}
    manifest = ck.save(tmp_path / "1", tree)
    files = {"1": manifest.state_files, "2": ck.save(tmp_path / "2", {"w": W + 1}).state_files}
    place = [_reading.Source(_storage.folder(tmp_path / step / "state"), files[step]) for step in ("2", "1")]
    leaf = manifest.leaves["w"]
    ((_, data, found),) = _reading.read(_reading.wanted("w", leaf, [(0, 0)]), place, lambda chunk, data: bytes(data))
    assert found == ""
    assert data == W.tobytes()
    ((_, data, found),) = _reading.read(_reading.wanted("w", leaf, [(0, 0)]), place[:1])
    assert data is None
    assert found.startswith("digest ")


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_the_public_way_to_place_arrays_gives_the_same(memory, mesh8, monkeypatch, spec):
    """A later JAX may have no `batched_device_put`: docs/decisions/0001."""
    tree = {
        "w": jax.device_put(W, NamedSharding(mesh8, spec)),
        "free": jnp.arange(3.0),
        "half": jnp.ones(5, jnp.bfloat16),
        "key": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh8, P("x"))),
    }
    ck.save(memory, tree)
    monkeypatch.setattr(_place, "_put", None)
    restored = ck.restore(memory, tree)
    assert same(restored, tree)
    assert restored["w"].sharding == tree["w"].sharding
    assert not restored["free"].committed
    pointer = restored["free"].unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(restored["free"]).unsafe_buffer_pointer() == pointer


def test_a_hundred_saves_and_restores_hold_no_memory(tmp_path, mesh8):
    """A month of saves must not grow the process: what a save took, it gives back."""
    tree = {"w": jax.device_put(np.zeros((1024, 1024), np.float32), NamedSharding(mesh8, P("x"))), "n": np.zeros(10**5)}

    def once(step: int) -> None:
        ck.save(tmp_path / "1", tree, step=1, overwrite=step > 0)
        ck.restore(tmp_path / "1", tree)

    for step in range(20):
        once(step)
    before = psutil.Process().memory_info().rss
    for step in range(20, 120):
        once(step)
    assert psutil.Process().memory_info().rss - before < 40e6  # 100 times 9.8 MB went in and out.


def test_a_place_beyond_its_file_is_never_read(tmp_path, monkeypatch):
    """A stranger's tree may say any offset, also one that no system call takes."""
    manifest = ck.save(tmp_path / "1", {"w": W})
    source = _reading.Source(_storage.folder(tmp_path / "1" / "state"), manifest.state_files)
    (chunk,) = _reading.wanted("w", manifest.leaves["w"], [(0, 0)])
    value = source.find(chunk)
    for offset in (2**63, manifest.state_files[value.file], value.offset + 1):
        monkeypatch.setattr(source.tree, "find", lambda key, at=offset: _ocdbt.Value(value.file, at, value.length))
        ((_, data, found),) = _reading.read([chunk], [source], lambda chunk, data: bytes(data))
        assert (data, found) == (None, "nothing")


@pytest.mark.parametrize("odd", ["an error", "a flipped bit"])
def test_what_is_read_wrong_once_is_read_once_more(tmp_path, monkeypatch, odd):
    """A hiccup of a network's file system is no damage, for which a run would go back to an older step."""
    ck.save(tmp_path / "1", {"w": W})
    read_into, reads = _storage.Folder.read_into, []

    def once_wrong(place, name, start, buffer):
        reads.append(name)
        if len(reads) == 1 and odd == "an error":
            raise OSError(errno.EIO, "Input/output error", name)
        count = read_into(place, name, start, buffer)
        buffer[7] ^= len(reads) == 1
        return count

    monkeypatch.setattr(_storage.Folder, "read_into", once_wrong)
    assert same(ck.restore(tmp_path / "1"), {"w": np.asarray(W)})
    assert reads


def _reads(monkeypatch, fail: Callable[[str], bool], number: int = errno.EIO):
    """Files whose names are such cannot be read."""
    for method in ("read", "read_into"):
        real = getattr(_storage.Folder, method)

        def failing(place, name, *rest, _real=real, **named):
            if fail(f"{place}/{name}"):
                raise OSError(number, os.strerror(number), name)
            return _real(place, name, *rest, **named)

        monkeypatch.setattr(_storage.Folder, method, failing)


READS = [
    ck.restore,
    lambda path: ck.restore(path, {"w": np.asarray(W), "v": np.zeros(3)}),
    lambda path: ck.open(path)["w"][...],
]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("part", ["values", "keys", "the root of the keys"])
@pytest.mark.parametrize("read", READS, ids=["restore", "restore into a target", "open"])
def test_what_cannot_be_read_is_not_said_to_be_damaged(tmp_path, monkeypatch, number, part, read):
    """Nothing was seen of its bytes: a run that took it for damage would never look at that step again."""
    state = ck.save(tmp_path / "1", {"w": W, "v": np.zeros(3)}).state_files
    value = _ocdbt.Tree(_storage.folder(tmp_path / "1" / "state"), state).find("w/c/0/0")
    nodes = {name for name in state if name.startswith("d/")}
    files = {"values": {value.file}, "keys": nodes, "the root of the keys": {"manifest.ocdbt"}}[part]
    _reads(monkeypatch, lambda path: any(path.endswith(f"state/{name}") for name in files), number)
    with pytest.raises(OSError, match=r"[vw], chunk \[0.* in .* could not be read; that is not known") as caught:
        read(tmp_path / "1")
    assert caught.value.errno == number
    report = ck.verify(tmp_path / "1")
    assert os.strerror(number) in str(report)
    assert "not to be read now, which may be no damage" in str(report)
    assert not report.ok
    with pytest.raises(OSError, match="not to be read now"):
        report.check()
    monkeypatch.undo()
    assert ck.verify(tmp_path / "1").ok


def test_damage_beside_what_cannot_be_read_is_damage(tmp_path, monkeypatch):
    manifest = ck.save(tmp_path / "1", {"a": np.arange(5000), "b": np.arange(5000)})
    value = _ocdbt.Tree(_storage.folder(tmp_path / "1" / "state"), manifest.state_files).find("b/c/0")
    with (tmp_path / "1" / "state" / value.file).open("r+b") as file:
        file.seek(value.offset + 5)
        file.write(b"\x55")
    read_into = _storage.Folder.read_into

    def failing(place, name, start, buffer):
        if start != value.offset:
            raise OSError(errno.EIO, "Input/output error", name)
        return read_into(place, name, start, buffer)

    read = _storage.Folder.read

    def failing_again(place, name, start=0, length=-1, **named):
        if "/d/" in name and start != value.offset:
            raise OSError(errno.EIO, "Input/output error", name)
        return read(place, name, start, length, **named)

    monkeypatch.setattr(_storage.Folder, "read_into", failing)
    monkeypatch.setattr(_storage.Folder, "read", failing_again)
    with pytest.raises(ck.Corrupt, match=r"(?s)a: expected chunk \[0\].*\[Errno 5\].*b: expected chunk \[0\].*digest"):
        ck.restore(tmp_path / "1")


@pytest.mark.parametrize("part", ["state/d/", "state/manifest.ocdbt"])
def test_keys_that_cannot_be_read_once_are_read_once_more(tmp_path, monkeypatch, part):
    ck.save(tmp_path / "1", {"w": W})
    failed = []
    _reads(monkeypatch, lambda path: part in path and not failed and not failed.append(path))
    assert same(ck.restore(tmp_path / "1"), {"w": np.asarray(W)})
    assert failed


def test_a_small_file_that_cannot_be_read_is_told_by_verify(tmp_path, monkeypatch):
    ck.save(tmp_path / "1", {"w": W})
    _reads(monkeypatch, lambda path: path.endswith("_METADATA"))
    assert "state/_METADATA: expected digest" in str(ck.verify(tmp_path / "1"))


class _Refusing(http.server.BaseHTTPRequestHandler):
    """A bucket that gives one answer to all."""

    code = 0

    def do_GET(self):
        self.send_response(self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("code", "odd"), [(403, True), (429, True), (500, True), (503, True), (400, True), (416, False)]
)
def test_a_bucket_that_gives_nothing_is_not_damaged(monkeypatch, code, odd):
    """Only the code for a file that is too short says something of the bytes."""
    monkeypatch.setattr(_Refusing, "code", code)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(_storage, "_RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever).start()
        place = _storage.folder("s3://bucket/1/state")
        with pytest.raises(ValueError, match=str(code)) as caught:
            _reading.open_store(place).read("w/c/0").result()
        server.shutdown()
    assert (_storage.trouble(caught.value, place) is not None) == odd


def test_an_empty_leaf_before_a_large_one(tmp_path):
    tree = {"a": jnp.zeros((0,)), "b": jnp.zeros((40_000_000,)), "c": jnp.zeros((0, 3))}
    ck.save(tmp_path / "1", tree)
    assert same(ck.restore(tmp_path / "1", tree), tree)


def test_damage_in_a_large_leaf_before_another_is_told(tmp_path, mesh8):
    """No thread waits for memory that a leaf holds which will never be whole."""
    n = 41_000_000
    manifest = ck.save(tmp_path / "1", {"a": np.full(n, 1, np.float32), "b": np.full(n, 2, np.float32)})
    source = _reading.Source(_storage.folder(tmp_path / "1" / "state"), manifest.state_files)
    value = source.tree.find("a/c/0")
    with (tmp_path / "1" / "state" / value.file).open("r+b") as file:
        file.seek(value.offset + 5)
        file.write(b"\x55")
    like = {k: jax.ShapeDtypeStruct((n,), np.float32, sharding=NamedSharding(mesh8, P("x"))) for k in "ab"}
    for _ in range(5):
        with pytest.raises(ck.Corrupt, match=r"  a: expected chunk \[0\]"):
            ck.restore(tmp_path / "1", like)


def test_what_befalls_a_thread_is_raised(tmp_path, monkeypatch):
    tree = {"a": np.zeros(10_000_000, np.float32), "b": np.zeros(40_000_000, np.float32)}
    ck.save(tmp_path / "1", tree)
    take = _reading.Buffers.take

    def failing(self, size):
        if size == 40_000_000:
            raise MemoryError("no memory for 40 MB")
        return take(self, size)

    monkeypatch.setattr(_reading.Buffers, "take", failing)
    like = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in tree.items()}
    with pytest.raises(MemoryError, match="no memory"):
        ck.restore(tmp_path / "1", like)


def test_an_exact_name_is_no_glob(memory):
    ck.save(memory, {"x[1]": 1, "x1": 2, "*": 3})
    assert ck.restore(memory, only="x[1]") == {"x[1]": 1}
    assert ck.restore(memory, only="*") == {"*": 3}
    assert ck.restore(memory, only="x*") == {"x[1]": 1, "x1": 2}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cast": "float32"}, "cast is True or False"),
        ({"only": 5}, "only is a glob or a list of them"),
        ({"sharding": "mesh"}, "not a mesh"),
        ({"on_missing": "ignore"}, 'on_missing is "error" or "keep"'),
    ],
    ids=str,
)
def test_slips_in_the_arguments_are_said_at_once(memory, mesh8, wrong, says):
    ck.save(memory, {"w": 1})
    wrong = {name: mesh8 if value == "mesh" else value for name, value in wrong.items()}
    with pytest.raises((TypeError, ValueError), match=says):
        ck.restore(memory, **wrong)


def test_a_root_without_a_checkpoint_is_named_as_the_cause(memory):
    with pytest.raises(TypeError, match=r"as ckpt_jax\.latest returns where there is no checkpoint"):
        ck.restore(ck.latest(memory))


def test_overwrite_is_a_bool(memory):
    with pytest.raises(TypeError, match="overwrite is True or False"):
        ck.save(memory, {"w": 1}, overwrite="no")


def test_messages_say_what_to_do(tmp_path):
    key = jax.random.key(0)
    ck.save(tmp_path / "1", {"key": key, "raw": jax.random.key_data(key), "w": {"a": jnp.ones(2), "b": jnp.ones(3)}})
    like = {"key": jax.random.key_data(key), "raw": key, "w": {"a": jnp.zeros(2), "b": jnp.zeros(3)}}
    with pytest.raises(ck.Mismatch) as caught:
        ck.restore(tmp_path / "1", like)
    assert "restore it as a key; jax.random.key_data gives its numbers" in str(caught.value)
    assert "restore it as uint32; jax.random.wrap_key_data makes a key of it" in str(caught.value)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ck.Mismatch, match=r"at key path sharding\['w'\].* the symmetric difference on key sets is b"):
        ck.restore(tmp_path / "1", like, sharding={"key": one, "raw": one, "w": {"a": one}})


def test_a_report_reads_as_a_sentence(tmp_path):
    ck.save(tmp_path / "1", {"w": np.ones(2)})
    whole = str(ck.verify(tmp_path / "1"))
    assert whole.startswith(f"{tmp_path}/1: 1 chunks read back, all as they were saved (16 B, ")
    assert str(ck.verify(tmp_path / "1", level="files")).startswith(f"{tmp_path}/1: all files there (")
    (tmp_path / "1" / "MANIFEST.json").write_text("{}")
    assert str(ck.verify(tmp_path / "1")).startswith(f"{tmp_path}/1: damaged in 1 place:\n  MANIFEST.json")


@pytest.mark.parametrize(
    "like", [np.zeros(8000, np.int8), jax.ShapeDtypeStruct((8000,), "int8")], ids=["host", "device"]
)
def test_a_cast_that_loses_values_is_told_of_leaves_in_one_chunk_and_in_many(memory, mesh42, like) -> None:
    many = jax.device_put(jnp.arange(8000.0), NamedSharding(mesh42, P(("data", "model"))))
    ck.save(memory, {"many": many, "one": np.float32(1e9), "whole": np.full(1000, 1e9, np.float32)})
    with pytest.raises(ck.Mismatch) as told:
        ck.restore(memory, {"many": like, "one": np.int8(0), "whole": np.zeros(1000, np.int8)}, cast=True)
    assert [fault.place for fault in told.value.faults] == ["many", "one", "whole"]
    assert told.value.faults[0].found == "7,872 values that int8 cannot hold, such as 128.0"


def test_metadata_may_have_keys_that_no_utf_8_holds():
    odd = {"\ud800": 1, "a": {"\udfff$": [2]}}
    ck.save("memory://metadata/odd", {"w": np.ones(1)}, metadata=odd)
    assert ck.open("memory://metadata/odd").metadata == odd
