"""Reads yes or no out of what a model says, for questions such as POPE's "Is there a dog in the image?"."""

from __future__ import annotations

import re

from .answer_text import final_parts, unwrapped, without_final_marks


_YES, _NO = r"(?:yes|yeah|yep|yup)", r"(?:no|nope|nah)"
# these begin with a no, or hold one, that denies nothing
_NO_ANSWER = re.compile(r"\bno (?:idea|clue|way (?:to|of)|comment|answer|information|opinion)\b")
_NO_DOUBT = re.compile(r"\b(?:no (?:doubt|question)|not only|without (?:a |any )?doubt)\b")
_BOTH = re.compile(rf"\b{_YES}\b\W*(?:and|or|but)?\W*{_NO}\b(?! [a-z])|\b{_NO}\b\W*(?:and|or|but)?\W*{_YES}\b")
_FIRST = re.compile(rf"\W*(?:(?P<yes>{_YES})|(?P<no>{_NO}))\b")
_STATED = re.compile(rf"\b(?:answer|ans)\b(?: is| would be| should be)?\W*(?:(?P<yes>{_YES})|(?P<no>{_NO}))\b")
_UNSURE = re.compile(
    r"\b(?:not (?:sure|certain|clear|possible|enough)|unsure|uncertain|unclear|unable|maybe|perhaps|possibly"
    r"|(?:hard|difficult|impossible) to|(?:do not|don't|cannot|can't|can not|could not|couldn't) "
    r"(?:know|tell|say|determine|be determined|answer|judge)|may or may not|might)\b"
)
_DENIES = re.compile(r"\b(?:no|not|none|never|nothing|without|cannot|\w+n't|(?:is|are|was|does|do|did)nt)\b")
_AFFIRMS = re.compile(
    r"\b(?:there (?:is|are|(?:seems|appears) to be)|there's|(?:i|we|you) (?:can )?see|(?:image|picture|photo|scene|it) (?:\w+ly )?"
    r"(?:shows|contains|has|includes|features|depicts|does))\b(?! (?:\w+ly )?(?:no|not|none|nothing)\b)"
)


def extract_yes_no(answer: str) -> str | None:
    r"""The "yes" or "no" that an answer gives, or None where it gives neither, or both.

    Case, full-width forms, Markdown, LaTeX and <think> parts make no difference. The first rule that applies decides:

    1. \boxed{...} or <answer>...</answer>, if it can be read, is the answer.
    2. "Yes and no", "yes or no", "no, yes": None. "No idea", "no way to tell": None.
    3. The first word is yes (yeah, yep) or no (nope, nah): "Yes, there is a dog.", "No, there isn't". A first no with a yes
       after it gives None.
    4. "The answer is yes", "Answer: no"; None if both are stated.
    5. It is unsure ("not sure", "cannot tell", "maybe"): None.
    6. The word yes stands somewhere: yes; with a denial (no, not, n't, none, never, nothing, without) beside it None.
    7. It denies ("There is no dog", "I do not see one") or affirms ("There is a dog", "The image shows a dog"); what
       does both ("There is a cat but no dog") gives None, since it is not known which of them was asked for.
    """
    text = unwrapped(answer)
    found = {_read(part) for part in final_parts(text)} - {None}
    if found:
        return found.pop() if len(found) == 1 else None
    return _read(without_final_marks(text))


def _read(text: str) -> str | None:
    text = _NO_DOUBT.sub(" ", " ".join(text.lower().split()))
    if _BOTH.search(text) or _NO_ANSWER.search(text):
        return None
    says_yes = re.search(rf"\b{_YES}\b", text) is not None
    if first := _FIRST.match(text):
        return None if first["no"] and says_yes else "yes" if first["yes"] else "no"
    stated = {"yes" if match["yes"] else "no" for match in _STATED.finditer(text)}
    if stated:
        return stated.pop() if len(stated) == 1 else None
    if _UNSURE.search(text):
        return None
    denies = _DENIES.search(text) is not None
    affirms = says_yes or _AFFIRMS.search(text) is not None
    if denies == affirms:
        return None
    return "yes" if affirms else "no"
