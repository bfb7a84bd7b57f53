"""The worker's side of drafting beside the target: orders in, token ids out (`pacer.decoding.concurrent`)."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter_ns

import torch

from pacer.decoding.writer import Draftsman, Job


def in_process(pipe: Connection, draftsman: Draftsman) -> None:
    """A worker's life in a process of its own, on one core."""
    torch.set_num_threads(1)
    _serve(pipe, draftsman)


def in_thread(pipe: Connection, draftsman: Draftsman) -> None:
    """A worker's life in a thread, on a GPU with a stream of its own."""
    device = draftsman.stack.device
    if device.type != "cuda":
        return _serve(pipe, draftsman)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # the weights are there
    with torch.cuda.stream(stream):
        _serve(pipe, draftsman)


def one_line(error: BaseException) -> str:
    """An error's kind and its first words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _serve(pipe: Connection, draftsman: Draftsman) -> None:
    """Answer orders until the other end is closed."""
    number = 0
    try:
        with torch.inference_mode():
            writer = draftsman.writer()
            while True:
                number, order = pipe.recv()
                if not isinstance(order, Job):
                    if order is not None:
                        writer.reset(order)
                    pipe.send((number, 0, []))
                    continue
                writer.begin(order)
                for _ in range(max(order.draws)):
                    start = perf_counter_ns()
                    ids = writer.draw()
                    pipe.send((number, perf_counter_ns() - start, ids))
                    if pipe.poll():  # what is drawn now is void
                        break
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the owner has gone
    except Exception as error:  # it is the parent's to raise
        with suppress(OSError):
            pipe.send((number, 0, one_line(error)))
    finally:
        pipe.close()
