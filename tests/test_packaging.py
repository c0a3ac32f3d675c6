"""The folders at the top install as one package, `headrace`, whatever folders the user's own project has."""

import filecmp
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "samples" / "nycflights13"
LAYERS = ("storage", "joins", "etl", "pipelines", "cli", "samples")


def run(*command, cwd, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reuse_kernels(package):
    """Copy the kernels that are compiled beside our sources to the same sources in an installed package.

    Numba takes them for those of a source with the same time and size.
    """
    for layer in LAYERS:
        for kernels in (ROOT / layer).rglob("*.nb[ic]"):
            source = kernels.parent.parent / f"{kernels.name.partition('.')[0]}.py"
            copy = package / source.relative_to(ROOT)
            if copy.exists() and filecmp.cmp(source, copy, shallow=False):
                shutil.copystat(source, copy)
                (copy.parent / "__pycache__").mkdir(exist_ok=True)
                shutil.copy(kernels, copy.parent / "__pycache__")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the Python of an environment with the wheel, and the dependencies but not the sources of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", site, wheel, cwd=folder)
    reuse_kernels(site / "headrace")
    return folder / "env" / "bin" / "python"


@pytest.fixture
def project(tmp_path):
    """Return a user's project whose own packages have the names of our folders."""
    for name in LAYERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user')\n")
    return tmp_path


def test_what_the_readme_writes_is_ignored_by_git_and_removed_by_make_clean():
    readme, ignored = (ROOT / "README.md").read_text(), (ROOT / ".gitignore").read_text().splitlines()
    removed = re.search(r"rm -rf (.*)", (ROOT / "Makefile").read_text())[1].split()
    written = {*re.findall(r"^    \$ .* -o (\S+)", readme, re.MULTILINE), *re.findall(r"connect\('(.*?)'\)", readme)}
    written |= set(re.findall(r"Table\.build\(\"(.*?)\"", readme))
    assert written == {"joined.parquet", "orders", "planes.tbl", "quotes.tbl", "shop.db"}
    for name in written:
        assert any(line.strip("/").rstrip("*") == name for line in ignored), name
        assert any(word.rstrip("*") == name for word in removed), name


def test_every_package_of_the_tree_is_installed():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {"headrace"}
    for layer in LAYERS:
        modules = (ROOT / layer).rglob("__init__.py")
        there |= {"headrace." + ".".join(module.parent.relative_to(ROOT).parts) for module in modules}
    assert declared == there


def test_the_wheel_runs_beside_folders_of_the_same_names(installed, project):
    assert "Usage: headrace" in run(installed, "-m", "headrace", "--help", cwd=project)
    planes = SAMPLES / "planes.parquet"
    run(
        *(installed, "-m", "headrace", "table", "build", planes, "--key", "tailnum", "--unique", "-o", "planes.tbl"),
        cwd=project,
    )
    where = run(installed, "-c", "import headrace.storage; print(headrace.storage.__file__)", cwd=project)
    assert ROOT not in Path(where.strip()).parents
    examples = re.findall(r"And from Python:\n\n((?:    .*\n|\n)+)", (ROOT / "README.md").read_text())
    code = "\n".join(line[4:] for line in examples[0].splitlines()).replace("samples/nycflights13", str(SAMPLES))
    run(installed, "-c", code, cwd=project)
