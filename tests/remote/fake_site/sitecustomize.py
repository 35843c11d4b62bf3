"""On the "node" of the tests: the engine without a model, slowed down, in the run's process."""

import os
import sys

if "replay_lib.remote.node_run" in sys.orig_argv:
    sys.path.insert(0, os.environ["FAKE_TESTS"])
    import time

    import fake_engine

    plain = fake_engine.FakeEngine.run_many

    def slowly(self, experiments):
        """Each outcome after a while, or an error."""
        if "FAKE_RAISES" in os.environ:
            from replay_lib.errors import EngineError

            raise EngineError(os.environ["FAKE_RAISES"])
        for outcome in plain(self, experiments):
            time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
            yield outcome

    fake_engine.FakeEngine.run_many = slowly
    fake_engine.install()
    if "FAKE_METHODS" in os.environ:
        from pathlib import Path

        fake_engine.only_recorded_methods(Path(os.environ["FAKE_METHODS"]))
