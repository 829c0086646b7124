"""`separate_async` without hybrid replicas ends with a TypeError wherever lines of INFO are logged, as they are by default."""

import ast
import inspect

from verl.trainer.ppo.v1 import trainer_separate_async as module

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "adapters/verl/driver/modes.py leaves out that module's lines of INFO"
EXPECTED = "no error"
module.logger.setLevel("INFO")  # verl's default


def seen() -> str:
    """Make the log call of `_setup` that has `flush=True`, with the arguments that are written there."""
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    for call in (call for call in calls if ast.unparse(call.func) == "logger.info"):
        try:
            module.logger.info("", **{word.arg: ast.literal_eval(word.value) for word in call.keywords})
        except TypeError as error:
            return f"TypeError: {str(error).partition(' got ')[2]}"
    return "no error"


def with_workaround() -> str:
    import mismatch_ext.adapters.verl.driver.modes  # noqa: F401

    return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
