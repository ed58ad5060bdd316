"""The highest value of a figure so far, in a file of the run directory."""


class NewPlugin:
    def __init__(self, context, config):
        self.file, self.figure, self.best = context.run_directory / "newplugin.txt", config.figure, float("-inf")

    def log(self, step, metrics):
        """Take the figures of a step, those of its line in metrics.jsonl."""
        if metrics.get(self.figure, self.best) > self.best:
            self.best = metrics[self.figure]
            self.file.write_text(f"step {step}: {self.figure} {self.best}\n")

    def close(self, summary):
        """`summary` is what summary.json holds, or None where the run ended before its last step."""
