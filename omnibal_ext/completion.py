"""What a shell offers behind a command: a script for bash, or for zsh, made of the parsers of its words.

The script has all words in it and starts no program: a key is answered at once. It offers a command's flags, the
choices of the flag that stands before, files otherwise, and behind `--` the flags of whom they go to.
"""

import argparse
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from textwrap import dedent

SHELLS = ("bash", "zsh")
_ZSH = """\
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit
bashcompinit
"""


def script(
    shell: str, program: str, parsers: Mapping[str, ArgumentParser], behind: Mapping[str, ArgumentParser]
) -> str:
    """A script for one of `SHELLS` that completes `program WORD ...`.

    `parsers` are those of its words, `behind` those of what follows -- after some of them.
    """
    words = "\n".join(f"        {word}) _{program}_{_plain(word)} ;;" for word in parsers)
    functions = [_function(f"_{program}_{_plain(word)}", parser, behind.get(word)) for word, parser in parsers.items()]
    whole = dedent("""\
        _PROGRAM() {
            local word="${COMP_WORDS[COMP_CWORD]}" flag="" after="" flags="" choices="" number
            COMPREPLY=()
            for ((number = 2; number < COMP_CWORD; number++)); do
                case "${COMP_WORDS[number]}" in
                --) after=yes flag="" ;;
                -*) flag="${COMP_WORDS[number]}" ;;
                esac
            done
            if ((COMP_CWORD == 1)); then
                choices="WORDS --help --version"
            else
                case "${COMP_WORDS[1]}" in
        CASES
                *) return ;;
                esac
            fi
            case "$word" in
            -*) [[ -z "$flags" ]] || choices="$flags" ;;
            esac
            [[ -z "$choices" ]] || COMPREPLY=($(compgen -W "$choices" -- "$word"))
        }
        complete -o default -F _PROGRAM PROGRAM
        """)
    whole = whole.replace("PROGRAM", program).replace("WORDS ", " ".join(parsers) + " ").replace("CASES", words)
    return (_ZSH if shell == "zsh" else "") + "".join(functions) + whole


def _function(name: str, parser: ArgumentParser, behind: ArgumentParser | None) -> str:
    """A shell function that sets `flags`, and `choices` of the flag before or of a word in its own place."""
    parts = [
        (f"    if [[ -n $after ]]; then\n{_sets(behind)}        return\n    fi\n" if behind else ""),
        _sets(parser),
    ]
    return f"{name}() {{\n" + "".join(parts) + "}\n"


def _sets(parser: ArgumentParser) -> str:
    offered = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = " ".join(option for action in offered for option in action.option_strings if option.startswith("--"))
    lines = [f"    flags={shlex.quote(flags)}\n", '    case "$flag" in\n']
    for options, choices in _choices(parser):
        lines.append(f"    {options}) choices={shlex.quote(choices)} ;;\n")
    return "".join([*lines, "    esac\n"])


def _choices(parser: ArgumentParser) -> Iterator[tuple[str, str]]:
    """The flags of every action that has choices, as a pattern, and these; of words in their own place as ''."""
    for action in parser._actions:
        if action.choices:
            yield "|".join(action.option_strings) or "''", " ".join(map(str, action.choices))


def _plain(word: str) -> str:
    return word.replace("-", "_")
