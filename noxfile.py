"""Tests the wheel with every declared pair of Python and PyTorch, one environment at a time.

.ci/wheels                                   # builds the wheel into dist/
nox --list
nox -s "versions-3.13(torch='2.15.0')"       # one pair
nox -s versions -- smoke                     # the short set with every pair
nox -r -s "versions-3.13(torch='2.15.0')"    # keeps the environment, and takes one that was kept

Three pairs run the whole suite, the others the files of SMOKE. An environment takes up to 7 GB and is removed after its
session without -r. Each session writes its row into docs/versions.md.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")
#: Pairs that run everything, with their other packages: the oldest declared, those of constraints.txt, the newest.
WHOLE = {("3.11", "2.12.1"): "oldest", ("3.11", "2.13.0"): "pinned", ("3.14", "2.15.0"): "newest"}
SMOKE = (
    "tests/test_public_surface.py",
    "tests/test_torch_private.py",
    "tests/plans/test_calls_in_a_row.py",
    "tests/layer/test_linear.py",
    "tests/call/test_packed.py",
    "tests/test_readme.py",
    "tests/caches/test_policies.py",
    "tests/checkpoints/test_recognise.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_look.py",
    "tests/distributed/test_tensor_parallel.py",
    "tests/inspection/test_record_torch.py",
    "tests/inspection/test_record_transformers.py",
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_upgrade.py",
    "tests/kernels/test_dispatch.py",
    "tests/kernels/test_tracing.py",
    "tests/latent/test_formula.py",
    "tests/masks/test_structure.py",
    "tests/native/test_plan.py",
    "tests/nn/test_compile_export.py",
    "tests/nn/test_module_samples.py",
    "tests/plot/test_heads.py",
    "tests/plot/test_html.py",
    "tests/positions/test_rotary.py",
    "tests/transformer/test_layers.py",
)

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["versions"]


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """Install the wheel and run the tests on it."""
    wheels = sorted(Path("dist").glob("clearhead-*-cp311-abi3-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        session.error("dist/ has no wheel: run .ci/wheels first")
    pair = (str(session.python), torch)
    whole = pair in WHOLE and "smoke" not in session.posargs
    packages = WHOLE.get(pair, "newest")
    temporary = Path(session.create_tmp())
    constraints, junit = temporary / "constraints.txt", temporary / "junit.xml"
    constraints.write_text("\n".join([f"torch=={torch}", *_constraints(packages)]), encoding="utf-8")
    try:
        # pip takes a wheel of the same version for the same wheel.
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", "clearhead", silent=True)
        session.install("-c", str(constraints), f"clearhead[test] @ {wheels[-1].resolve().as_uri()}")
        session.run("python", ".ci/check_wheel.py")
        environment = {"CLEARHEAD_TEST_INSTALLED": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": None}
        files = ["tests"] if whole else [*SMOKE]
        command = ["pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *files, "--pyargs", "clearhead"]
        session.run(*command, env=environment, success_codes=[0, 1])
        session.run("python", ".ci/versions.py", str(junit), packages, "all" if whole else "smoke")
    finally:
        if not getattr(session.virtualenv, "reuse_existing", False):
            shutil.rmtree(session.virtualenv.location)


def _constraints(packages: str) -> list[str]:
    if packages == "newest":
        return []
    if packages == "pinned":
        lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if not line.startswith(("torch==", "#"))]
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    declared = [text for extra in ("cli", "plot", "hf") for text in extras[extra]]
    return [text.replace(">=", "==") for text in declared]
