"""The workflows: they parse, run targets that exist, and publish what was built and nothing else, without a token."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(name):
    return yaml.safe_load((ROOT / ".github/workflows" / name).read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_steps_run_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        commands = step.get("run", "")
        assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= targets
        for program in re.findall(r"^(\.\S+)", commands, re.MULTILINE):
            assert (ROOT / program).stat().st_mode & 0o111, f"{program} cannot be executed"
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
    assert workflow["permissions"] == {"contents": "read"}, "jobs ask for what they need more"


def test_no_workflow_uses_a_secret():
    assert WORKFLOWS
    assert not [path.name for path in WORKFLOWS if re.search(r"secrets\.|password|token:", _without_id_token(path))]


def _without_id_token(path):
    return path.read_text().replace("id-token: write", "")


def test_publishing_needs_the_build_and_the_trust_of_one_job():
    jobs = load("publish.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in jobs["build"]
    names = {step["with"]["name"] for step in steps({"jobs": jobs}) if "artifact" in step.get("uses", "")}
    assert names == {"dist"}
    assert jobs["publish"]["steps"][-1]["with"]["skip-existing"] is True


def test_only_tags_are_published_and_the_tag_is_the_version():
    workflow = load("publish.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    [check] = [step["run"] for step in steps(workflow) if "GITHUB_REF_NAME" in step.get("run", "")]
    assert check == 'python release/check_tag.py "$GITHUB_REF_NAME" "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"'


def test_tests_run_on_the_oldest_python_that_is_supported():
    versions = load("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={versions[0]}"' in (ROOT / "core/pyproject.toml").read_text()
