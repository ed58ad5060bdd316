"""The card of an exported model: README.md with the header that the Hub reads, the recipe, versions, figures and pictures."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlcore.files import storage_errors, write_atomically
from rlcore.run.observers import ObservedRun
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver
from rlcore.run.storage.run_directory import RunDirectory

SHOWN = ("reward_mean", "success_rate", "response_length_mean", "loss", "entropy", "grad_norm")
"""Figures of the last step that are told, besides those of evaluations."""


class ModelCard(LoopObserver):
    """Writes the card once the sinks have drawn their pictures."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run

    def on_export(self, summary: Mapping[str, object]) -> None:
        """See LoopObserver."""
        write_model_card(self._run.plan, self._run.directory, Path(str(summary["model"])), summary)


def write_model_card(plan: RunPlan, directory: RunDirectory, exported: Path, summary: Mapping[str, object]) -> None:
    """Write README.md beside an exported model, or adapters, with the pictures that sinks drew when the run ended; `summary` is
    what summary.json holds."""
    recipe = plan.recipe
    base = recipe.model.path if _is_on_hub(recipe.model.path) else None
    begins = f"from [{base}](https://huggingface.co/{base}) " if base else ""
    kind = "Adapters" if recipe.checkpoint.export == "peft" else "A model"
    sections = [
        _header(plan, base),
        f"# {recipe.run.name}\n\n{kind} trained {begins}with rlcore and the algorithm `{recipe.algorithm.name}`, "
        f"in {summary.get('steps', 0)} steps.",
        f"## Figures\n\n{_figures(summary)}{_pictures(directory, exported)}",
        *([f"## Chat template\n\n{_variables(plan)}"] if recipe.model.chat_template_kwargs else []),
        f"## Recipe\n\n```toml\n{plan.resolved.strip()}\n```",
        f"## Versions\n\n{_versions(directory)}",
    ]
    write_atomically(exported / "README.md", "\n\n".join(sections) + "\n")


def _header(plan: RunPlan, base: str | None) -> str:
    """The YAML between two lines of dashes. JSON's texts and arrays are YAML's too."""
    recipe = plan.recipe
    is_peft = recipe.checkpoint.export == "peft"
    splits = [data for data in (recipe.data.train, recipe.data.evaluation) if data is not None]
    parts = [part for data in splits for part in (data.parts().values() if data.mix is not None else [data])]
    named = [part.path for part in parts if part.source == "huggingface" and part.path and _is_on_hub(part.path)]
    values: dict[str, object] = {"base_model": base, "datasets": list(dict.fromkeys(named))}
    task = "text-classification" if plan.algorithm.needs.head == "value" else "text-generation"
    values |= {"library_name": "peft" if is_peft else "transformers", "pipeline_tag": task}
    values |= {"tags": ["rlcore", recipe.algorithm.name, *(["lora"] if recipe.lora is not None else [])]}
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items() if value]
    return "\n".join(["---", *lines, "---"])


def _is_on_hub(path: str) -> bool:
    """Whether a path is a name on the Hub: a local directory's says nothing to others."""
    return len(Path(path).parts) <= 2 and not path.startswith(("/", "~", ".")) and not Path(path).exists()


def _variables(plan: RunPlan) -> str:
    """The variables that chats were rendered with, and whether what reads the export has to be told."""
    variables = plan.recipe.model.chat_template_kwargs
    told = (
        "give them to the base model's template"
        if plan.recipe.checkpoint.export == "peft"
        else "the template has them as defaults"
    )
    return f"Trained with these variables; {told}.\n\n```json\n{json.dumps(dict(variables), ensure_ascii=False)}\n```"


def _figures(summary: Mapping[str, object]) -> str:
    """A table of the first and the last evaluation, and of the last step."""
    last = summary.get("last_step")
    rows: dict[str, object] = {}
    for label, name in (("accuracy", "held-out pass@1"), ("held_out_loss", "held-out loss")):
        if f"{label}_before" in summary:
            rows |= {f"{name} before": summary[f"{label}_before"], f"{name} after": summary[f"{label}_after"]}
    if isinstance(last, Mapping):
        rows |= {name: value for name, value in last.items() if name in SHOWN or name.startswith("eval/")}
    lines = [f"| {name} | {value:.4f} |" for name, value in rows.items() if isinstance(value, float)]
    return "\n".join(["| Figure | Value |", "|---|---|", *lines])


def _versions(directory: RunDirectory) -> str:
    """Those that environment.json of the run has."""
    versions = directory.versions
    return "\n".join(["| Package | Version |", "|---|---|", *(f"| {name} | {number} |" for name, number in versions.items())])


def _pictures(directory: RunDirectory, exported: Path) -> str:
    """Copy the pictures of the run directory that are newer than its summary; return the text that shows them."""
    end = directory.summary_file.stat().st_mtime_ns
    names = [path.name for path in sorted(directory.path.glob("*.png")) if path.stat().st_mtime_ns >= end]
    for name in names:
        with storage_errors(name, exported):
            shutil.copyfile(directory.path / name, exported / name)
    return "".join(f"\n\n![{Path(name).stem} of the run]({name})" for name in names)
