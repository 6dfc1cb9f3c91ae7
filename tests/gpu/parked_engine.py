"""``python -m tests.gpu.parked_engine``: an engine in a process of its own, as bootstrap is. Prints its ring's path."""

from __future__ import annotations

from tests.gpu.serving import serving


def main() -> None:
    with serving(make_record=lambda step: step.delayed(1000)) as engine:
        print(engine.path, flush=True)
        engine.stopped = True
        engine.engine.wait()


if __name__ == "__main__":
    main()
