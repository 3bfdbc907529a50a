"""Commands of other distributions: found, grouped, listed and loaded."""

import sys
from importlib import metadata

import pytest
from engram_vit.commands.plugins import COMMANDS_GROUP, GROUP_HELP

HELLO = '''
    import typer

    def hello(name: str, times: int = 1, loud: bool = False) -> None:
        """Greet a person.

        This paragraph is for the command's own help.
        """
        for _ in range(times):
            typer.echo(name.upper() if loud else name)
'''


def test_command_of_another_distribution_runs_with_its_arguments(site, engram):
    site.install("greeter", commands={"hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO})
    outcome = engram("hello", "ada", "--times", "2", "--loud")
    assert (outcome.code, outcome.out, outcome.err) == (0, "ADA\nADA\n", "")


def test_dot_in_a_name_makes_a_sub_group(site, engram):
    site.install(
        "greeter",
        commands={"say.hello": "greeter_cli:hello", "say.it.twice": "greeter_cli:hello"},
        modules={"greeter_cli": HELLO},
    )
    assert engram("say", "hello", "ada").out == "ada\n"
    assert engram("say", "it", "twice", "eve").out == "eve\n"


def test_list_is_another_name_of_ls(site, engram):
    site.install("greeter", commands={"say.ls": "greeter:hello"}, modules={"greeter": HELLO})
    assert engram("say", "list", "ada").out == "ada\n"
    assert "list" not in engram("say", "--help").out


def test_two_distributions_share_one_sub_group(site, engram):
    site.install("one", commands={"say.a": "one_cli:hello"}, modules={"one_cli": HELLO})
    site.install("two", commands={"say.b": "two_cli:hello"}, modules={"two_cli": HELLO})
    assert engram("say", "a", "ada").out == "ada\n"
    assert engram("say", "b", "ada").out == "ada\n"


def test_group_without_a_command_shows_its_help(site, engram):
    site.install(
        "greeter", commands={"say.hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO}
    )
    outcome = engram("say")
    assert "hello" in outcome.out
    assert "Greet a person." in outcome.out


def test_listing_shows_the_first_paragraph_and_imports_nothing(site, engram):
    module = f"{HELLO}\n    raise RuntimeError('imported')\n"
    site.install(
        "greeter",
        commands={"hello": "greeter.deep.cli:hello"},
        modules={"greeter.deep.cli": module},
    )
    outcome = engram("--help")
    assert outcome.code == 0
    assert "Greet a person." in outcome.out
    assert "This paragraph" not in outcome.out
    assert not {"greeter", "greeter.deep", "greeter.deep.cli"} & sys.modules.keys()


def test_listing_does_not_import_the_parent_package(site, engram):
    modules = {"heavy.__init__": "raise RuntimeError('imported')", "heavy.cli": HELLO}
    site.install("heavy", commands={"hello": "heavy.cli:hello"}, modules=modules)
    assert "Greet a person." in engram("--help").out


def test_help_of_one_command_shows_all_of_its_docstring(site, engram):
    site.install("greeter", commands={"hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO})
    outcome = engram("hello", "--help")
    assert outcome.code == 0
    assert "Usage: engram hello" in outcome.out
    assert "This paragraph is for the command's own help." in outcome.out
    assert "--times" in outcome.out


def test_square_brackets_in_a_docstring_are_not_markup(site, engram):
    module = 'def shapes() -> None:\n    """Print [memory] and [bold] shapes."""\n'
    site.install("greeter", commands={"shapes": "shape_cli:shapes"}, modules={"shape_cli": module})
    assert "Print [memory] and [bold] shapes." in engram("--help").out
    assert "Print [memory] and [bold] shapes." in engram("shapes", "--help").out


def test_function_defined_elsewhere_is_listed_without_summary_and_runs(site, engram):
    site.install(
        "greeter",
        commands={"hello": "facade:hello"},
        modules={"facade": "from greeter_cli import hello", "greeter_cli": HELLO},
    )
    assert "unavailable" not in engram("--help").out.partition("hello")[2].splitlines()[0]
    assert engram("hello", "ada").out == "ada\n"


def test_only_the_invoked_plugin_is_imported(site, engram):
    site.install("greeter", commands={"hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO})
    site.install(
        "other",
        commands={"other": "other_cli:run", "say.other": "other_cli:run"},
        modules={"other_cli": "raise RuntimeError('imported')"},
    )
    assert engram("hello", "ada").code == 0
    assert "other_cli" not in sys.modules


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param(None, "No module named 'broken_cli'", id="module missing"),
        pytest.param("import no_such_thing\n", "No module named 'no_such_thing'", id="import"),
        pytest.param(
            "from no_such_thing.deep import x\n",
            "No module named 'no_such_thing'",
            id="from-import",
        ),
        pytest.param("def run(:\n", "invalid syntax", id="syntax"),
    ],
)
def test_broken_plugin_is_listed_with_the_reason_and_the_others_work(site, engram, module, reason):
    modules = {"broken_cli": module} if module else {}
    site.install("broken-one", commands={"wreck": "broken_cli:run"}, modules=modules)
    site.install("greeter", commands={"hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO})

    listing = engram("--help")
    assert listing.code == 0
    row = next(line for line in listing.out.splitlines() if "wreck" in line)
    assert f"unavailable: {reason}" in row

    invoked = engram("wreck", "--any", "thing")
    assert invoked.code == 1
    assert invoked.out == ""
    assert invoked.err.startswith("error: `engram wreck` of broken-one is unavailable: ")
    assert reason in invoked.err
    assert "Traceback" not in invoked.err

    assert engram("hello", "ada").out == "ada\n"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param("x = 1\n", "has no attribute 'run'", id="function missing"),
        pytest.param("run = 3\n", "broken_cli:run is not a function", id="not a function"),
        pytest.param(
            "try:\n    import no_such_thing\nfinally:\n    pass\n",
            "No module named 'no_such_thing'",
            id="import hidden from the listing",
        ),
    ],
)
def test_fault_that_only_an_import_shows_is_reported_on_invocation(site, engram, module, reason):
    site.install("broken", commands={"wreck": "broken_cli:run"}, modules={"broken_cli": module})
    assert engram("--help").code == 0
    invoked = engram("wreck")
    assert invoked.code == 1
    assert reason in invoked.err


def test_name_claimed_twice_answers_for_neither(site, engram):
    site.install("one", commands={"hello": "one_cli:hello"}, modules={"one_cli": HELLO})
    site.install("two", commands={"hello": "two_cli:hello"}, modules={"two_cli": HELLO})
    reason = "several installed distributions add `engram hello`"
    assert reason.replace("`", "") in engram("--help").out.replace("`", "")
    outcome = engram("hello", "ada")
    assert (outcome.code, outcome.err) == (1, f"error: {reason}\n")


def test_sub_group_beats_a_command_of_the_same_name(site, engram):
    site.install(
        "greeter",
        commands={"say": "greeter_cli:hello", "say.hello": "greeter_cli:hello"},
        modules={"greeter_cli": HELLO},
    )
    assert engram("say", "hello", "ada").out == "ada\n"


def complete(site, words: str) -> list[str]:
    process = site.start(
        _ENGRAM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
    )
    out, err = process.communicate(timeout=60)
    assert err == ""
    return out.split()


def test_shell_completion_offers_commands_and_their_options(site):
    site.install("greeter", commands={"hello": "greeter_cli:hello"}, modules={"greeter_cli": HELLO})
    assert "hello" in complete(site, "engram ")
    assert "--times" in complete(site, "engram hello --")


def test_shell_completion_knows_the_clients_own_commands(site):
    assert {"predict", "pull", "push", "tasks"} <= set(complete(site, "engram "))
    assert {"alias", "history", "ls", "rm", "rollback"} <= set(complete(site, "engram tasks "))
    assert "--watch" in complete(site, "engram predict --")


def test_shell_completion_of_a_broken_plugin_is_silent(site):
    site.install("broken", commands={"wreck": "broken_cli:run"})
    assert "wreck" in complete(site, "engram wr")
    assert complete(site, "engram wreck x") == []


def test_every_group_of_our_commands_is_described():
    names = [one.name for one in metadata.entry_points(group=COMMANDS_GROUP)]
    assert {name.partition(".")[0] for name in names if "." in name} == GROUP_HELP.keys()
