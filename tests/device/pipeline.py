"""A pipeline of VSLPipe's shape, small enough to run a thousand times: two partitions, two weight slots, four streams.

`E` embeds, `A` projects, `Q` brings queries, keys and values to the host, `C` attends there, `H` brings the outputs
back, `B` ends the layer, and `Z` chooses tokens; `W` brings a layer's weights into the slot of the layer before the
last. All that a lane does is ordinary torch code and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import product

import torch

from tests.device.lanes import CPU, NOTHING, Lanes, Task, Turn, Wait, first
from workbench.engine.devices.driver import Driver

LAYERS, PARTS, WIDTH, ROWS, WORDS = 4, 2, 8, 3, 32
MATRIX = WIDTH * WIDTH
LAYER = 4 * MATRIX
"""Numbers in a layer's weights: three projections, and the one that ends it."""

FAULTS = {
    "pageable": True,
    "words changed early": True,
    "read by the host": True,
    "freed early": True,
    "freed early, but used": False,
    "place made late": True,
    "weights dropped": True,
    "weights dropped, but used": False,
    "landing on the copying stream": False,
}
"""What the pipeline can do otherwise, and whether that is wrong."""

HostTouches = Callable[..., None]


class Pipeline:
    """The model in memory, and what each task does.

    Parameters
    ----------
    driver : Driver
    fault : str
        What is done otherwise, one of `FAULTS`.
    """

    def __init__(self, driver: Driver, fault: str = "") -> None:
        self.lanes = Lanes(driver)
        self.fault = fault
        self._device = driver.device
        self._host_touches: HostTouches = getattr(driver, "host_touches", _untold)
        random = torch.Generator().manual_seed(4)
        pinned = partial(_pinned, driver)
        self.weights = [pinned(("weights", layer), LAYER) for layer in range(LAYERS)]
        for layer in self.weights:
            layer.copy_(torch.randn(LAYER, generator=random) / WIDTH**0.5)
        table = pinned("table", WORDS * WIDTH)
        table.copy_(torch.randn(WORDS * WIDTH, generator=random))
        self.sent = [pinned(("sent", part), ROWS * 3 * WIDTH) for part in range(PARTS)]
        self.back = [pinned(("back", part), ROWS * WIDTH) for part in range(PARTS)]
        self.words = [pinned(("words", part), ROWS, torch.int64) for part in range(PARTS)]
        self.chosen = [pinned(("chosen", part), ROWS, torch.int64) for part in range(PARTS)]
        for part, words in enumerate(self.words):
            words.copy_(torch.arange(ROWS) + 10 * part)
        self.held: dict[tuple[int, int], list[torch.Tensor]] = {at: [] for at in product(range(LAYERS), range(PARTS))}
        self.x: dict[int, torch.Tensor] = {}
        self.qkv: dict[int, torch.Tensor] = {}
        gpu = self.lanes.streams["gpu"]
        with gpu.issuing():
            self.slots = [self._empty(LAYER) for _ in range(2)]
            self.attended = [self._empty(ROWS * WIDTH) for _ in range(PARTS)]
            self.table = self._empty(WORDS * WIDTH)
        gpu.copy(self.table, table)
        gpu.record().wait()

    def bring(self, layer: int) -> None:
        """W, in two packets."""
        if self.fault.startswith("weights dropped"):
            self.slots[layer % 2] = self._empty(LAYER)
        source = self.weights[layer].clone() if self.fault == "pageable" else self.weights[layer]
        for packet in slice(0, LAYER // 2), slice(LAYER // 2, LAYER):
            self.lanes.streams["weights"].copy(self.slots[layer % 2][packet], source[packet])

    def embed(self, part: int) -> None:
        """E."""
        words = self._empty(ROWS, torch.int64)
        self.lanes.streams["gpu"].copy(words, self.words[part])
        self.x[part] = self.table.view(WORDS, WIDTH)[words]
        if self.fault == "words changed early":
            self.words[part].zero_()

    def project(self, layer: int, part: int) -> None:
        """A. What comes back has its place from the stream that reads it, before the copy is issued."""
        matrix = self.slots[layer % 2][: 3 * MATRIX].view(3 * WIDTH, WIDTH)
        self.qkv[part] = torch.nn.functional.linear(self.x[part].tanh(), matrix).reshape(-1)
        if self.fault not in ("place made late", "landing on the copying stream"):
            self.attended[part] = self._empty(ROWS * WIDTH)

    def send(self, part: int) -> None:
        """Q."""
        self.lanes.streams["d2h"].copy(self.sent[part], self.qkv[part])
        if self.fault == "freed early, but used":
            self._use(self.qkv[part], "d2h")
        if self.fault.startswith("freed early"):
            del self.qkv[part]

    def attend(self, layer: int, part: int) -> None:
        """C, over all that was held before."""
        self._host_touches(f"C{layer}", reads=[self.sent[part]], writes=[self.back[part]])
        q, k, v = self.sent[part].view(ROWS, 3, WIDTH).unbind(1)
        self.held[layer, part].append(torch.stack((k, v)))
        keys, values = torch.stack(self.held[layer, part]).unbind(1)
        shares = (q * keys).sum(-1).softmax(0)
        self.back[part].copy_((shares[..., None] * values).sum(0).reshape(-1))

    def take(self, part: int) -> None:
        """H."""
        if self.fault in ("place made late", "landing on the copying stream"):
            with self.lanes.streams["gpu" if self.fault == "place made late" else "h2d"].issuing():
                self.attended[part] = self._empty(ROWS * WIDTH)
        self.lanes.streams["h2d"].copy(self.attended[part], self.back[part])

    def finish(self, layer: int, part: int) -> None:
        """B."""
        matrix = self.slots[layer % 2][3 * MATRIX :].view(WIDTH, WIDTH)
        if self.fault == "read by the host":
            self.attended[part].tolist()
        self.x[part] = self.x[part] + torch.nn.functional.linear(self.attended[part].view(ROWS, WIDTH), matrix)
        if self.fault.startswith("weights dropped") and part + 1 == PARTS:
            if self.fault == "weights dropped, but used":
                self._use(self.slots[layer % 2], "gpu")
            del matrix
            self.slots[layer % 2] = torch.empty(0)

    def choose(self, part: int) -> None:
        """Z. What is not a number is chosen before all others, so that it shows."""
        logits = torch.nn.functional.linear(self.x[part], self.table.view(WORDS, WIDTH))
        self.lanes.streams["gpu"].copy(self.chosen[part], logits.nan_to_num(nan=1e9).argmax(-1))

    def plan(self) -> list[Task]:
        """One iteration, with every wait that is needed and none that another implies."""
        tasks: list[Task] = []
        at: dict[str, int] = {}

        def add(name: str, lane: str, action: Callable[[], None], *after: str) -> None:
            at[name] = len(tasks)
            tasks.append(Task(lane, action, tuple(at[other] for other in after)))

        def attention(layer: int, part: int) -> None:
            here = f"{layer}{part}"
            weights = () if part else (f"W{layer}",)  # the second partition stands behind the first, which waits
            add(f"A{here}", "gpu", partial(self.project, layer, part), *weights)
            add(f"Q{here}", "d2h", partial(self.send, part), f"A{here}")
            add(f"C{here}", CPU, partial(self.attend, layer, part), f"Q{here}")
            add(f"H{here}", "h2d", partial(self.take, part), f"C{here}")

        for layer in range(2):
            add(f"W{layer}", "weights", partial(self.bring, layer))
        for part in range(PARTS):
            add(f"E{part}", "gpu", partial(self.embed, part))
            attention(0, part)
        for layer in range(LAYERS):
            for part in range(PARTS):
                add(f"B{layer}{part}", "gpu", partial(self.finish, layer, part), f"H{layer}{part}")
                if layer + 1 < LAYERS:
                    attention(layer + 1, part)
            if layer + 2 < LAYERS:
                add(f"W{layer + 2}", "weights", partial(self.bring, layer + 2), f"B{layer}{PARTS - 1}")
        for part in range(PARTS):
            add(f"Z{part}", "gpu", partial(self.choose, part))
        return tasks

    def waits(self) -> list[Wait]:
        """All waits of an iteration; the last is the host's for the last task."""
        plan = self.plan()
        found = [(place, other) for place, task in enumerate(plan) for other in task.after]
        return [*found, (len(plan), len(plan) - 1)]

    def serve(self, steps: int, turn: Turn = first, forgotten: frozenset[Wait] = NOTHING) -> list[list[int]]:
        """Generate `steps` tokens for every row: the words of each step."""
        said: list[list[int]] = []
        for _ in range(steps):
            self.lanes.run(self.plan(), turn, forgotten)
            self._host_touches("the end", reads=self.chosen, writes=self.words)
            for words, chosen in zip(self.words, self.chosen, strict=True):
                words.copy_(chosen)
            said.append(torch.cat(self.words).tolist())
        return said

    def _empty(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _use(self, tensor: torch.Tensor, lane: str) -> None:
        tensor.record_stream(self.lanes.streams[lane]._stream)  # type: ignore[attr-defined]


def _pinned(driver: Driver, key: Hashable, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return driver.pinned(key, (size,), dtype)


def _untold(label: str, *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    """Nobody checks what the host touches."""
