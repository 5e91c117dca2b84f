"""Tests of the distribution: an sdist is whole, and wheel and editable install work."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from source_files import ROOT

pytestmark = pytest.mark.slow


def run(*command, cwd=None):
    # Nothing of the environment of these tests may help the new one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(kind, tree, output):
    """Build by the hook of PEP 517 or 660 in a tree of sources, without a network."""
    output.mkdir(exist_ok=True)
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(output)!r})", cwd=tree)
    [file] = [path for path in output.iterdir() if path.suffix in (".whl", ".gz")]
    return file


def install(wheel, folder):
    """Return the Python of a new environment with a wheel and, behind it, the libraries of this environment."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A path in a .pth file is searched, and the .pth files in that path are not read.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "libraries.pth").write_text("\n".join([sysconfig.get_path("purelib"), *libraries]) + "\n")
    return python


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist of the files that git would commit."""
    folder = tmp_path_factory.mktemp("sdist")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git repository")
    listed = list(filter(None, listed.stdout.split("\0")))
    names = {name for name in listed if (ROOT / name).is_file()}
    for name in listed:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        if name in names or (ROOT / name).is_symlink():
            shutil.copyfile(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    return build("sdist", folder / "tree", folder / "dist"), names


@pytest.fixture(scope="module")
def pythons(sdist, tmp_path_factory):
    """Python of an environment with the wheel of the sdist, and of one with an editable install."""
    folder, made = tmp_path_factory.mktemp("environments"), {}
    for kind in ("wheel", "editable"):
        with tarfile.open(sdist[0]) as archive:
            archive.extractall(folder / kind, filter="data")
        [tree] = (folder / kind).iterdir()
        made[kind] = install(build(kind, tree, folder / f"{kind}_dist"), folder / f"{kind}_venv")
    return made


def test_sdist_holds_every_file_of_the_repository(sdist):
    path, names = sdist
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert names - inside == set()


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_clean_environment_imports_the_installed_package_and_an_editable_one_a_new_file(kind, pythons, tmp_path):
    code = "import json, metaphrase, metaphrase.training.recipe.recipe as r; print(json.dumps([metaphrase.__file__, r.__file__]))"
    package, recipe = map(Path, json.loads(run(pythons[kind], "-c", code, cwd=tmp_path)))
    assert pythons[kind].parents[1 if kind == "wheel" else 2] in package.parents
    assert recipe.relative_to(package.parent) == Path("training/recipe/recipe.py")
    assert (package.parent / "py.typed").is_file()
    if kind == "editable":
        (package.parent / "storage" / "new_module.py").write_text("ANSWER = 42\n")
        code = "from metaphrase.storage.new_module import ANSWER; print(ANSWER)"
        for folder in (tmp_path, package.parents[1]):
            assert run(pythons[kind], "-c", code, cwd=folder) == "42\n"


def test_wheel_runs_the_demo(pythons, tmp_path):
    options = "--output_dir run --num_train 300 --max_steps 2 --eval_strategy no --load_best_model_at_end false"
    options += " --max_validation_samples 8 --max_test_samples 8"
    said = run(pythons["wheel"], "-m", "metaphrase.scripts", "demo", *options.split(), cwd=tmp_path)
    assert "exact match" in said and (tmp_path / "run" / "model.safetensors").is_file()
