"""The simulated device: torch runs on it, late and rightly, and it notices every wait that is missing."""

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.device.lanes import NOTHING, STREAMS, Turn, Wait, first, last
from tests.device.pipeline import FAULTS, Pipeline
from tests.device.races import Access, Memory, RaceError
from tests.device.rehearsal import Event, Rehearsal, RehearsedDriver, Stream, rehearsed
from tests.device.streams import Adversary, LostError
from tests.device.tensors import DeviceTensor
from tests.examples import DEEP
from workbench.core.errors import EngineError
from workbench.engine.devices.host import HostDriver

STEPS = 2
HASTY = len(STREAMS) if DEEP else 1
"""Most streams that an adversary is hasty with."""
SEEDS = 8 if DEEP else 3


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def driver() -> RehearsedDriver:
    return rehearsed(Adversary())


def adversaries() -> Iterator[tuple[Adversary, Turn]]:
    """Sets of hasty streams, with lanes taking turns in either order, and some that draw lots."""
    for count in range(HASTY + 1):
        for hasty in combinations(STREAMS, count):
            yield Adversary(frozenset(hasty)), first
            yield Adversary(frozenset(hasty)), last
    for seed in range(SEEDS):
        yield Adversary(seed=seed), random.Random(seed).choice


@cache
def right_words() -> list[list[int]]:
    with torch.no_grad():
        return Pipeline(HostDriver()).serve(STEPS)


@cache
def waits() -> list[Wait]:
    return Pipeline(HostDriver()).waits()


def seen(
    adversary: Adversary,
    turn: Turn = first,
    forgotten: frozenset[Wait] = NOTHING,
    fault: str = "",
    *,
    races: bool = True,
) -> str:
    """What is seen of a mistake: the name of an error, wrong words or waits of the host; "" if nothing is."""
    driver = rehearsed(adversary, races=races)
    try:
        words = Pipeline(driver, fault).serve(STEPS, turn, forgotten)
        driver.close()
    except (RuntimeError, LookupError) as error:
        return type(error).__name__
    if driver.waits:
        return f"the host waited for {list(driver.waits)}"
    return "" if words == right_words() else "wrong words"


def seen_by_values(forgotten: frozenset[Wait] = NOTHING, fault: str = "") -> str:
    """What the first adversary that notices sees, without a look at accesses."""
    found = (seen(*each, forgotten, fault, races=False) for each in adversaries())
    return next(filter(None, found), "")


# -------------------------------------------------------------------------------------------- ordinary torch on `sim`


def test_torch_makes_a_device_in_python_as_it_did(driver):
    """The interface is experimental: if this fails alone, torch has changed it."""
    with driver.stream("gpu").issuing():
        made = torch.empty(2, 3, device=driver.device)
        made.fill_(2.0)
        product = made @ made.t()
    assert isinstance(made, DeviceTensor)
    assert isinstance(product, DeviceTensor)
    assert (str(made.device), made.is_cuda) == ("sim:0", False)
    assert product.stored.isnan().all(), "work was done that nobody waits for"
    driver.stream("gpu").record().wait()
    assert (product.stored == 12).all()


def test_the_rest_of_torch_does_not_see_the_device(driver):
    assert not torch.accelerator.is_available()
    with torch.enable_grad():
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    with torch.random.fork_rng():
        torch.manual_seed(0)


def numbers() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).sin()


def picked() -> torch.Tensor:
    return torch.tensor([2, 0, 3])


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "linear": lambda x, i: torch.nn.functional.linear(x, x),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "softmax": lambda x, i: x.softmax(-1),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "topk": lambda x, i: tuple(x.topk(2)),
    "sort": lambda x, i: tuple(x.sort(dim=1, descending=True, stable=True)),
    "rows": lambda x, i: x[i],
    "rows by indices on the host": lambda x, i: x[picked()],
    "numbers of a mask": lambda x, i: x[x > 0],
    "cat": lambda x, i: torch.cat((x, x.clone())),
    "views": lambda x, i: x.view(2, 12).t()[1:].unsqueeze(0).split([3, 8], dim=1),
    "reshape": lambda x, i: x.t().reshape(-1).view(torch.uint8),
    "types": lambda x, i: x.to(torch.bfloat16).double(),
    "made": lambda x, i: (x.new_zeros(2), torch.full((2,), 7, device=x.device), torch.ones_like(x)),
    "ranges": lambda x, i: (torch.arange(2, 9, 3, device=x.device), torch.eye(2, device=x.device)),
    "list": lambda x, i: torch.tensor([1, 2], device=x.device),
    "in place": lambda x, i: x.add_(1)[1:].mul_(x[:1]),
    "rows set": lambda x, i: (x.__setitem__(i, 7.0), x.index_add_(0, i, x[i])),
    "mask set": lambda x, i: (x.__setitem__(x > 0, 7.0), x),
    "out": lambda x, i: torch.mul(x, 2, out=torch.empty(4, 6, device=x.device)),
    "lists": lambda x, i: torch._foreach_add([x, x], 1.0),
    "numbers of the host": lambda x, i: x * torch.tensor(2.0),
    "counts": lambda x, i: i.bincount(minlength=5),
    "unique": lambda x, i: i.unique(return_counts=True),
    "repeated": lambda x, i: x[:3].repeat_interleave(i, dim=0),
    "where": lambda x, i: torch.where(x > 0)[0],
    "reads": lambda x, i: (x[1, 2].item(), i.tolist(), bool((x > 0).any()), x.cpu().numpy().tolist()),
    "to host": lambda x, i: torch.empty(4, 6).copy_(x),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_computes_what_it_does_on_the_host(driver, name, mode):
    with mode():
        expected = OPERATIONS[name](numbers(), picked())
        with driver.stream("gpu").issuing():
            found = OPERATIONS[name](numbers().to(driver.device), picked().to(driver.device))
            same(found, expected)


def same(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(found.cpu(), expected)
    elif isinstance(expected, tuple | list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::index.Tensor"),
        (lambda x: x.__setitem__(x > 0, 1.0), "aten::index_put_"),
        (lambda x: x.tolist(), "aten::_to_copy"),
        (lambda x: x.cpu(), "aten::_to_copy"),
        (lambda x: x.copy_(torch.ones(4)), "aten::copy_"),
        (lambda x: torch.ones(4).copy_(x), "aten::copy_"),
        (lambda x: torch.ones(4).to(x.device), "aten::copy_"),
    ],
)
def test_what_makes_the_host_wait_is_counted(driver, read, name):
    with driver.stream("gpu").issuing():
        x = torch.ones(4, device=driver.device)
        read(x)
    assert driver.waits == {name: 1}


def test_computing_makes_nobody_wait(driver):
    with driver.stream("gpu").issuing():
        x = torch.ones(4, device=driver.device)
        x[1:] = 3.0
        x.add_(x[torch.arange(4, device=driver.device)]).softmax(0)
    assert not driver.waits
    assert x.stored.isnan().all()


def test_numbers_of_the_host_go_with_the_launch(driver):
    number = torch.tensor(2.0)
    with driver.stream("gpu").issuing():
        doubled = torch.ones(4, device=driver.device) * number
        number.fill_(5.0)
        assert doubled.tolist() == [2.0] * 4


def test_new_memory_holds_no_numbers(driver):
    with driver.stream("gpu").issuing():
        full = torch.ones(4, device=driver.device)
        for empty in (torch.empty_like(full), full.new_empty(4), torch.empty(4, device=driver.device)):
            assert empty.cpu().isnan().all()


# ------------------------------------------------------------------------------------------------------ what is refused


def test_work_outside_of_every_stream_is_refused(driver):
    with pytest.raises(RuntimeError, match="outside of every stream"):
        torch.ones(4, device=driver.device)


def test_copies_over_the_link_need_pinned_rows(driver):
    pinned = driver.pinned("one", (64,), torch.uint8)
    with driver.stream("gpu").issuing():
        there = torch.empty(64, dtype=torch.uint8, device=driver.device)
        there.copy_(pinned, non_blocking=True)
        with pytest.raises(RuntimeError, match="not pinned"):
            there.copy_(torch.zeros(64, dtype=torch.uint8), non_blocking=True)
        with pytest.raises(RuntimeError, match="one row"):
            there[::2].copy_(pinned[::2], non_blocking=True)
        with pytest.raises(RuntimeError, match="does not wait"):
            there.to("cpu", non_blocking=True)
        with pytest.raises(RuntimeError, match="mixes"):
            there + torch.zeros(64)
    assert not driver.waits
    with pytest.raises(EngineError, match="not pinned"):
        driver.stream("h2d").copy(there, torch.zeros(64, dtype=torch.uint8))


def test_memory_has_an_end():
    driver = rehearsed(Adversary(), total=5000, limit=1000)
    with driver.stream("gpu").issuing():
        kept = torch.zeros(800, dtype=torch.uint8, device=driver.device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(300, dtype=torch.uint8, device=driver.device)
        del kept
        torch.zeros(900, dtype=torch.uint8, device=driver.device)
    assert driver.peak == 900
    assert driver.cuda.memory.used == 0
    with pytest.raises(EngineError, match="limit"):
        rehearsed(Adversary(), total=1000, limit=1001)
    with pytest.raises(torch.OutOfMemoryError):
        Pipeline(rehearsed(Adversary(), limit=3000)).serve(1)


def test_memory_is_pinned_once_and_given_back(driver):
    whole = torch.from_numpy(np.zeros(3 * 4096, np.uint8))
    runtime = driver.cuda.cudart()
    assert runtime.cudaHostRegister(whole.data_ptr(), 8192, 0) == 0
    assert runtime.cudaHostRegister(whole.data_ptr() + 4096, 8192, 0) != 0
    assert runtime.cudaHostUnregister(whole.data_ptr() + 4096) != 0
    assert runtime.cudaHostUnregister(whole.data_ptr()) == 0
    held = driver.pinned("one", (16,), torch.uint8)
    assert driver.pin(whole[5:50]).data_ptr() != whole[5:50].data_ptr()
    assert driver.is_pinned(held)
    driver.close()
    assert not driver.cuda.memory.pinned
    assert not driver.is_pinned(held)


# ------------------------------------------------------------------------------------------------- what is not in order


def test_a_hasty_stream_works_at_once_and_no_other():
    driver = rehearsed(Adversary(frozenset({"h2d"})))
    made = {}
    for name in STREAMS:
        with driver.stream(name).issuing():
            made[name] = torch.ones(4, device=driver.device)
    assert [name for name in STREAMS if made[name].stored[0] == 1] == ["h2d"]


def test_streams_that_read_one_another_need_an_order_and_shapes_do_not(driver):
    with driver.stream("one").issuing():
        there = torch.ones(4, device=driver.device)
    with driver.stream("other").issuing():
        assert torch.zeros_like(there).tolist() == [0.0] * 4
        for reads in (lambda: there + 1, there.max, lambda: there[0].item(), there.nonzero, there.tolist):
            with pytest.raises(RaceError):
                reads()


READ, WRITE = False, True


@pytest.mark.parametrize(
    ("accesses", "is_race"),
    [
        ([("a", WRITE, 0, 8, ""), ("b", READ, 4, 6, "")], True),
        ([("a", WRITE, 0, 8, ""), ("b", READ, 4, 6, "a")], False),
        ([("a", WRITE, 0, 8, ""), ("b", READ, 8, 9, "")], False),
        ([("a", READ, 0, 8, ""), ("b", READ, 0, 8, "")], False),
        ([("a", READ, 0, 8, ""), ("b", WRITE, 7, 9, "")], True),
        ([("a", WRITE, 0, 8, ""), ("a", READ, 0, 8, ""), ("b", READ, 0, 8, "")], True),
        ([("a", READ, 0, 8, ""), ("b", READ, 0, 8, ""), ("c", WRITE, 0, 8, "b")], True),
        ([("a", WRITE, 0, 8, ""), ("a", WRITE, 0, 4, ""), ("b", READ, 4, 8, "")], True),
    ],
)
def test_two_accesses_to_a_byte_need_an_order(accesses, is_race):
    """Each is a stream, what it does to which bytes, and whose work so far it knows to be over."""
    memory = Memory("memory")

    def touch_all() -> None:
        for place, (stream, writes, begin, end, known) in enumerate(accesses, 1):
            memory.touch(Access(stream, place, "", writes, begin, end), {known: place})

    if is_race:
        with pytest.raises(RaceError):
            touch_all()
    else:
        touch_all()


def test_pinned_memory_that_grows_under_a_copy_is_noticed(driver):
    with driver.stream("gpu").issuing():
        there = torch.empty(64, dtype=torch.uint8, device=driver.device)
    driver.stream("gpu").copy(there, driver.pinned("one", (64,), torch.uint8))
    with pytest.raises(RaceError, match="unpinning"):
        driver.pinned("one", (5000,), torch.uint8)


def test_an_event_that_was_never_recorded_has_passed(driver):
    with driver.stream("one").issuing():
        there = torch.ones(64, dtype=torch.uint8, device=driver.device)
    unrecorded = driver.cuda.Event()
    assert unrecorded.query()
    driver.stream("other")._stream.wait_event(unrecorded)
    with pytest.raises(RaceError):
        driver.stream("other").copy(driver.pinned("one", (64,), torch.uint8), there)


def test_a_copy_under_way_shows_as_numbers_that_are_none(driver):
    host = driver.pinned("one", (4,), torch.float32)
    host.zero_()
    with driver.stream("gpu").issuing():
        there = torch.ones(4, device=driver.device)
    driver.stream("gpu").copy(host, there)
    assert host.isnan().all()
    with pytest.raises(RaceError, match="the reader"):
        driver.host_touches("the reader", reads=[host], writes=[])
    driver.stream("gpu").record().wait()
    driver.host_touches("the reader", reads=[host], writes=[])
    assert (host == 1).all()


def test_no_adversary_changes_the_words():
    assert right_words()[0] != right_words()[1]
    for adversary, turn in adversaries():
        assert seen(adversary, turn) == "", adversary


def test_every_wait_is_there():
    assert len(waits()) == 39


@pytest.mark.parametrize("place", range(39))
def test_a_wait_left_out_is_noticed_by_clocks_and_by_values(place):
    forgotten = frozenset({waits()[place]})
    assert seen(Adversary(), forgotten=forgotten) == "RaceError"
    assert seen_by_values(forgotten)


@pytest.mark.parametrize(("fault", "is_wrong"), FAULTS.items())
def test_known_mistakes_are_noticed(fault, is_wrong):
    noticed = seen(Adversary(), fault=fault) or seen_by_values(fault=fault)
    assert bool(noticed) == is_wrong, noticed


@pytest.mark.parametrize("breaks", [1, 20, 100])
@pytest.mark.parametrize("hasty", [(), ("gpu", "h2d")], ids=["late", "hasty"])
def test_a_lost_device_is_an_error(breaks, hasty):
    driver = rehearsed(Adversary(frozenset(hasty), breaks=breaks))
    with pytest.raises(LostError):
        Pipeline(driver).serve(STEPS)
    with driver.stream("gpu").issuing(), pytest.raises(LostError):
        torch.ones(4, device=driver.device)
    with pytest.raises(LostError):
        driver.close()
    assert not driver.cuda.memory.pinned


# -------------------------------------------------------------------------------------------------------------- threads


def in_threads(driver: RehearsedDriver, rounds: int) -> dict[str, Exception | None]:
    """Each lane sends numbers to the device, computes and takes them back, in a thread of its own; their errors."""
    ended: dict[str, Exception | None] = {}

    def lane(name: str) -> None:
        try:
            stream = driver.stream(name)
            sent, back = (driver.pinned((name, way), (64,), torch.float32) for way in ("sent", "back"))
            for number in range(rounds):
                sent.fill_(number)
                with stream.issuing():
                    there = torch.empty(64, device=driver.device)
                    stream.copy(there, sent)
                    stream.copy(back, there * 2 + 1)
                    del there
                stream.record().wait()
                assert (back == 2 * number + 1).all()
            ended[name] = None
        except Exception as error:
            ended[name] = error

    threads = [threading.Thread(target=lane, args=(name,), daemon=True) for name in STREAMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return ended


@pytest.mark.parametrize(
    "adversary", [Adversary(), Adversary(frozenset({"gpu"})), Adversary(seed=1)], ids=["late", "hasty", "random"]
)
def test_threads_do_not_disturb_one_another(adversary):
    driver = rehearsed(adversary)
    assert in_threads(driver, 40) == dict.fromkeys(STREAMS)
    assert driver.cuda.memory.used == 0
    driver.close()


def test_a_lost_device_ends_every_thread():
    ended = in_threads(rehearsed(Adversary(breaks=50)), 40)
    assert {name: type(error) for name, error in ended.items()} == dict.fromkeys(STREAMS, LostError)


# -------------------------------------------------------------------------------------------------- as torch.cuda's own


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (Rehearsal.is_available, torch.cuda.is_available),
        (Rehearsal.current_device, torch.cuda.current_device),
        (Rehearsal.Stream, torch.cuda.Stream.__new__),
        (Rehearsal.Event, torch.cuda.Event.__new__),
        (Stream.wait_event, torch.cuda.Stream.wait_event),
        (Event.record, torch.cuda.Event.record),
        (Event.query, torch.cuda.Event.query),
        (Event.synchronize, torch.cuda.Event.synchronize),
        (Rehearsal.stream, torch.cuda.stream),
        (Rehearsal.cudart, torch.cuda.cudart),
        (Rehearsal.get_device_properties, torch.cuda.get_device_properties),
        (Rehearsal.set_per_process_memory_fraction, torch.cuda.set_per_process_memory_fraction),
        (Rehearsal.reset_peak_memory_stats, torch.cuda.reset_peak_memory_stats),
        (Rehearsal.max_memory_allocated, torch.cuda.max_memory_allocated),
        (Rehearsal.mem_get_info, torch.cuda.mem_get_info),
        (Rehearsal.synchronize, torch.cuda.synchronize),
        (Rehearsal.empty_cache, torch.cuda.empty_cache),
    ],
    ids=lambda function: function.__qualname__,
)
def test_the_rehearsal_takes_what_torch_takes(ours, torchs):
    assert parameters(ours) == parameters(torchs)


def parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    """Names and kinds."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind) for each in found if each.name not in ("self", "cls")]


def test_the_rehearsal_has_all_that_the_driver_calls():
    """What `torch.cuda` has and the rehearsal adds is this: nothing that a card would not have."""
    public = {name for name in vars(Rehearsal) if not name.startswith("_")}
    assert all(hasattr(torch.cuda, name) for name in public)
