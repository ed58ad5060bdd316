"""The environment `python`, which a program hands to a run."""

from attrs import frozen

from rlcore.spi import ConfigError, Environment, EnvironmentContext, Problem, Provider


@frozen(kw_only=True)
class PythonConfig:
    """`[environment.python]`: takes no options. The environment is an object of the program that calls rlcore.train."""


class NotGiven(Environment):
    """Stands where nobody has handed an environment over."""

    def __init__(self, context: EnvironmentContext, config: PythonConfig) -> None:  # noqa: ARG002
        expected = "an environment that a program hands over: rlcore.train(recipe, environment=…), also where a run is resumed"
        raise ConfigError([Problem(path="environment.name", found='"python", and none', expected=expected)])


PROVIDER = Provider(name="python", spi=(2, 0), config=PythonConfig, backend="rlcore.registry.python_environment:NotGiven")
