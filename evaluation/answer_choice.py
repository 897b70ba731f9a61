"""Reads the chosen option of a multiple-choice question out of what a model says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from string import ascii_uppercase

from ..configuration.errors import NormalignError
from .answer_text import final_parts, fold_full_width, unwrapped, without_final_marks
from .answer_yes_no import extract_yes_no


_Options = Mapping[str, str | None]

# one letter that is no part of a word ("C", but not the C of "C's" or "cat"), maybe in brackets or quotes
_LETTER = r"""[\s"'“”(\[{]*(?<!\w)(?P<letter>[A-Za-z])(?!\w|'\w)(?P<close>["'”)\]}]*)"""
_AT_START = re.compile(_LETTER)
_ALONE = re.compile(_LETTER + r"[\s.:,;!]*")
_DELIMITER = re.compile(r"[).\]:](?=\s|$)|[)\]:]|[,;!](?=\s|$)|\s*[-–—]+(?=\s)|\s*\n|\s*$")
_SECOND_LETTER = re.compile(
    r"(?:\s*[,/&+]\s*(?:or|and)?|\s+(?:or|and|nor)\b)\s*(?:maybe|perhaps|possibly)?\s*(?:option|choice)?" + _LETTER
    + r"|[.;:)\s]\s*[(\[]?(?P<bare>[A-Z])(?=\s*(?:$|[).:,;\]\n]|[A-Z]\b(?!\s+[a-z])))"
)  # fmt: skip
_MARKED = re.compile(r"(?:^|(?<=\s))[(\[]?(?P<letter>[A-Za-z])[).\]:]\s+(?=\S)", re.MULTILINE)

_IS = r"(?:'s|\s+(?:is|was|would be|should be|must be|will be|has to be))"
_SURELY = r"(?:\s*\b(?:therefore|thus|then|most|likely|probably|clearly|definitely|indeed|certainly)\b)*"
_NAMED = r"(?:\s*\bthe\b)?(?:\s*\b(?:option|choice|letter|answer)\b)?"
# each is looked for by itself: they overlap in "so the answer is C"
_CUES = (
    # "the answer is C", "Answer: (b)", "the correct option for this question is C"
    re.compile(
        rf"\b(?:answer|ans|solution|(?:correct|right|best) (?:option|choice))\b"
        rf"(?:\s+(?:to|for|of|among|here|in|from)\b[^.\n:]{{0,60}}?(?:{_IS}|\s*[:=])"
        rf"|{_IS}|\s*[:=.–—-]+|\s+(?:option|choice|letter)\b)?[:\s]*{_SURELY}{_NAMED}[:\s]*",
        re.IGNORECASE,
    ),
    # "so B", "I choose C", "it must be (D)"
    re.compile(
        rf"\b(?:so|therefore|thus|hence|i(?: would|'d| will)? (?:choose|pick|select|say|go with)|i chose"
        rf"|(?:it|this|that){_IS})\b,?(?:\s+(?:it|this|that){_IS})?{_SURELY}{_NAMED}\s+",
        re.IGNORECASE,
    ),
)
_IS_RIGHT = re.compile(
    r"(?<![\w'])(?P<letter>[A-Z])[\"')\]]*\s+is\s+(?:the\s+)?(?:most\s+|best\s+)?(?:likely\s+)?(?:correct|right|best|answer)\b"
)
_POINTED = (
    re.compile(r"\b(?:option|choice|answer|letter)\s+" + _LETTER, re.IGNORECASE),
    re.compile(r"[(\[](?P<letter>[A-Za-z])[)\]]"),
    re.compile(r"(?<![\w'’-])(?P<letter>[A-Z])[.!\"')\]]*$"),
)
_NOT_BEFORE = re.compile(
    r"(?:\b(?:not|no|never|nor|neither|without|than|unlike|except|cannot be)|n't)(?:\s+be)?\s+$", re.I
)
_NOT_AFTER = re.compile(
    r"[\"')\]]*\s*(?:(?:is|was|can|could|seems|looks)\s+)?(?:not\b|wrong|incorrect|false|isn't|can't|cannot)", re.I
)
_DENIED = re.compile(r"\b(?:not|no|never|nor|neither|isnt|arent|wasnt|werent|doesnt|dont|didnt|cant|cannot)\s+$")
# after an A these words show that it is no article: "A because", "A and B"
_AFTER_A = {"because", "since", "as", "is", "and", "or", "nor", "but", "isn't", "cannot", "can't", "seems"}
_AFTER_ANY = _AFTER_A | {"so", "given", "due", "based", "which"}


def extract_choice(
    answer: str, choices: Sequence[str] | Mapping[str, str] | None = None, letters: Sequence[str] = ascii_uppercase
) -> str | None:
    r"""The letter of the option that an answer chooses, or None where none can be read, or more than one.

    Case, full-width forms, Markdown, LaTeX text commands and <think> parts make no difference. The first rule that finds
    an option decides; where it finds several, the result is None. Letters that are not offered count as no letter.

    1. \boxed{...} or <answer>...</answer>, if it can be read, is the answer.
    2. A letter alone: "C", "c.", "(C)", "C)".
    3. An option's text alone ("a cat"), whatever its case, punctuation and articles.
    4. Claims: a letter at the start, set off from what follows ("C: cat", "C. a cat", "C because ..."), or at the start of
       a line with nothing after it; after "the answer is", "Answer:", "so", "I choose", "it must be", a letter or an option's
       text; "C is correct". Options that are only repeated before a claim are not claimed. A letter set off from the text of another option claims both; so do "A or B" and "A, B".
    5. Mentions: "option c"; a letter in brackets; a capital at the very end; an option's text as whole words in the
       answer, except inside a longer option's text ("dog" in "hot dog"). Not what is denied: "not B", "option A is wrong". For the
       options yes and no, a mention is what `extract_yes_no` reads.

    An A before a word is the English article, and an I the pronoun, unless set off or before a word such as "because" or
    "is". Where options' texts are letters that are offered, the letter is meant, not the text.

    Args:
        choices: the options' texts, in order, or by letter; None where they are not known.
        letters: the letters of the options, in order; those past the last choice are not offered.

    Raises:
        NormalignError: a letter is not one letter, is offered twice, or there are more choices than letters.
    """
    options = _options(choices, letters)
    names = dict(zip((name.upper() for name in options), options))
    upper = {name.upper(): text for name, text in options.items()}
    text = unwrapped(answer)
    found = {_read(part, upper) for part in final_parts(text)} - {None}
    if not found:
        found = {_read(without_final_marks(text), upper)} - {None}
    return names[found.pop()] if len(found) == 1 else None


def _options(choices: Sequence[str] | Mapping[str, str] | None, letters: Sequence[str]) -> _Options:
    if isinstance(choices, Mapping):
        options = dict(choices)
        letters = list(options)
    elif choices is None:
        options = dict.fromkeys(letters)
    else:
        if len(choices) > len(letters):
            raise NormalignError(
                f"There are {len(choices)} choices and {len(letters)} letters. Give each choice a letter."
            )
        options = dict(zip(letters, choices))
    wrong = [name for name in letters if not re.fullmatch("[A-Za-z]", str(name))]
    if wrong or len({name.upper() for name in letters}) < len(letters):
        raise NormalignError(
            f"The options' letters are {', '.join(map(repr, letters))}. Each has to be one letter from A to Z, and no two "
            f"may be the same."
        )
    return options


def _read(text: str, options: _Options) -> str | None:
    rules: tuple[Callable[[str, _Options], set[str]], ...] = (_letter_alone, _text_alone, _claimed, _mentioned)
    for rule in rules:
        if found := rule(text, options):
            return found.pop() if len(found) == 1 else None
    return None


def _letter_alone(text: str, options: _Options) -> set[str]:
    match = _ALONE.fullmatch(text)
    return {match["letter"].upper()} & set(options) if match else set()


def _text_alone(text: str, options: _Options) -> set[str]:
    """Letters of the options with this very text; where none has it, of those with it after `_plain`."""
    for form in (lambda said: fold_full_width(said).strip(" \n.!\"'").casefold(), _plain):
        wanted = form(text)
        found = {
            letter for letter, option in options.items() if option is not None and form(unwrapped(option)) == wanted
        }
        if wanted and found:
            return found
    return set()


def _claimed(text: str, options: _Options) -> set[str]:
    claimed = {match["letter"] for match in _IS_RIGHT.finditer(text)} & set(options)
    for line in text.split("\n"):
        claimed |= _letter_alone(line.strip(), options)
    # an answer that repeats itself without end has thousands of cues: no more is read behind each than an option's text
    reach = 200 + 2 * max((len(option or "") for option in options.values()), default=0)
    for pattern in _CUES:
        for cue in pattern.finditer(text):
            claimed |= _claim(text[cue.end() : cue.end() + reach], options, cued=True)
    first = _claim(text, options)
    listed = _other_options_listed(text, first, options) if first else set()
    # a model that repeats the options before it answers does not claim the first of them
    return claimed if claimed and listed else claimed | first | listed


def _claim(text: str, options: _Options, cued: bool = False) -> set[str]:
    """The letters that a text claims by what it starts with; behind a cue an option's text will do as well."""
    match = _AT_START.match(text)
    letter = match["letter"].upper() if match else ""
    sentence = re.split(r"(?<=\S)[.!?;](?=\s|$)|\n", text.lstrip("\"'“ "), maxsplit=1)[0]
    if cued and len(_plain(sentence)) > 1 and (named := _text_alone(sentence, options)):
        return named
    if letter not in options:
        return _text_alone(sentence, options) if cued and letter else set()
    rest = text[match.end() :]
    closed = bool(set(match["close"]) & set(")]}"))
    delimiter = _DELIMITER.match(rest)
    after = rest[delimiter.end() :] if delimiter else rest
    own = options[letter] is not None and bool(_plain(after)) and letter in _text_alone(after, options)
    if own and (delimiter or closed or rest[:1].isspace()):
        return {letter}
    if other := _second_letter(rest, letter, options):
        return {letter, other}
    if delimiter or closed:
        return {letter} | _text_alone(re.split(r"\n|(?<=\w)[.!;](?=\s|$)", after.strip(), maxsplit=1)[0], options)
    follower = re.match(r"\s+([\w']+)", rest)
    if not follower:
        return {letter} if not rest.strip() else set()
    word = follower.group(1).lower()
    if word in ("or", "nor") and letter != "I":
        return {letter} | _named(rest, options)
    if letter == "A":
        return {letter} if word in _AFTER_A and not _NOT_AFTER.match(rest) else set()
    if cued:
        return {letter} if letter != "I" else set()
    return {letter} if word in _AFTER_ANY - {"is"} and match["letter"].isupper() and letter != "I" else set()


def _second_letter(rest: str, first: str, options: _Options) -> str | None:
    """B in the rest of "A or B", "A, B", "A/B", "A B"."""
    match = _SECOND_LETTER.match(rest)
    if not match:
        return None
    letter = (match["letter"] or match["bare"]).upper()
    is_word = letter in "AI" and not match["bare"] and re.match(r"\s+[a-z]", rest[match.end() :])
    return letter if letter in options and letter != first and not is_word else None


def _other_options_listed(text: str, found: set[str], options: _Options) -> set[str]:
    listed = set()
    for match in _MARKED.finditer(text):
        letter, after = match["letter"].upper(), _plain(text[match.end() :])
        if letter in options and letter not in found:
            own = _plain(options[letter] or "")
            if not own or re.match(rf"{re.escape(own)}(?!\w)", after):
                listed.add(letter)
    return listed


def _mentioned(text: str, options: _Options) -> set[str]:
    found = set()
    owns = [own for own in (_plain(option or "") for option in options.values()) if len(own) > 1]
    # the C at the end of "it contains vitamin C" belongs to the option "vitamin C"
    end_is_text = _plain(text).endswith(tuple(owns))
    for pattern in _POINTED[: 2 if end_is_text else 3]:
        for match in pattern.finditer(text):
            letter, before, rest = (
                match["letter"].upper(),
                text[max(0, match.start() - 30) : match.start()],
                text[match.end() :],
            )
            follower = re.match(r"\s+([\w']+)", rest)
            article = (
                letter in "AI" and pattern is _POINTED[0] and follower and follower.group(1).lower() not in _AFTER_A
            )
            if letter in options and not (article or _NOT_BEFORE.search(before) or _NOT_AFTER.match(rest)):
                found.add(letter)
    for match in re.finditer(r"(?<![\w'])[A-Z](?![\w'])", text):
        if other := _second_letter(text[match.end() :], match.group(), options):
            found |= {match.group(), other} & set(options)
    return found | _named(text, options)


def _named(text: str, options: _Options) -> set[str]:
    """Letters of the options whose texts stand in the answer as whole words and are not denied."""
    texts = {letter: _plain(option or "") for letter, option in options.items()}
    if sorted(texts.values()) == ["no", "yes"]:
        said = extract_yes_no(text)
        return {letter for letter, option in texts.items() if option == said}
    said, taken, found = _plain(text), [], set()
    for letter, option in sorted(texts.items(), key=lambda item: -len(item[1])):
        if not option or option.upper() in options:
            continue
        for match in re.finditer(rf"(?<![\w.-]){re.escape(option)}(?!\w|\.\d)", said):
            inside = any(
                start <= match.start() and match.end() <= end and other != option for start, end, other in taken
            )
            if not inside:
                taken.append((match.start(), match.end(), option))
                if not _DENIED.search(said[max(0, match.start() - 30) : match.start()]):
                    found.add(letter)
    return found


def _plain(text: str) -> str:
    """Lower case, without punctuation and articles; numbers keep their sign and their point."""
    text = unwrapped(text).casefold().replace("'", "")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(
        r"(?<=\d)\.(?=\d)|(?<![\w.])-(?=\d)|\w|(.)",
        lambda m: m.group() if m.group(1) is None else " ",
        text,
        flags=re.S,
    )
    return " ".join(re.sub(r"\b(?:an?|the)\s+(?=\w)", "", text).split())
