"""Normalises the notation of answers: LaTeX and Unicode, spaces, signs, digits."""

import re
import unicodedata

COMMANDS = {
    "\N{MINUS SIGN}": "-",
    "\N{SMALL HYPHEN-MINUS}": "-",
    "\N{FULLWIDTH HYPHEN-MINUS}": "-",
    "\N{FULLWIDTH PLUS SIGN}": "+",
    "\N{FULLWIDTH COMMA}": ",",
    "\N{FULLWIDTH FULL STOP}": ".",
    "\N{FULLWIDTH SOLIDUS}": "/",
    "\N{FRACTION SLASH}": "/",
    "\N{DIVISION SLASH}": "/",
    "\N{FULLWIDTH PERCENT SIGN}": "%",
    "\N{FULLWIDTH LEFT PARENTHESIS}": "(",
    "\N{FULLWIDTH RIGHT PARENTHESIS}": ")",
    "\N{MULTIPLICATION SIGN}": "\\times ",
    "\N{DIVISION SIGN}": "\\div ",
    "\N{MIDDLE DOT}": "\\cdot ",
    "\N{DOT OPERATOR}": "\\cdot ",
    "\N{DEGREE SIGN}": "^\\circ ",
    "\N{INFINITY}": "\\infty ",
    "\N{GREEK SMALL LETTER PI}": "\\pi ",
    "\N{LESS-THAN OR EQUAL TO}": "\\le ",
    "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
    "\N{PLUS-MINUS SIGN}": "\\pm ",
    "\N{NOT EQUAL TO}": "\\ne ",
    "\N{ELEMENT OF}": "\\in ",
    "\N{NOT AN ELEMENT OF}": "\\notin ",
    "\N{INTERSECTION}": "\\cap ",
    "\N{DOUBLE-STRUCK CAPITAL R}": "\\mathbb{R}",
    "\N{DOUBLE-STRUCK CAPITAL Z}": "\\mathbb{Z}",
    "\N{DOUBLE-STRUCK CAPITAL N}": "\\mathbb{N}",
    "\N{DIVIDES}": "\\mid ",
    "\N{LOGICAL OR}": "\\lor ",
    "\N{LOGICAL AND}": "\\land ",
    "\N{SET MINUS}": "\\setminus ",
    "\N{UNION}": "\\cup ",
    "\N{EMPTY SET}": "\\emptyset ",
    "\N{ALMOST EQUAL TO}": "\\approx ",
    "\N{NO-BREAK SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ",
    "\N{THIN SPACE}": " ",
    "\N{ZERO WIDTH SPACE}": "",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
STYLES = "text|textbf|textit|textrm|textnormal|texttt|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mbox|operatorname"
STYLED = re.compile(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}")

PASSES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![\w)}\]])[\u2010-\u2015](?=\s*[\d.\\(])", "-"),  # a dash before a number; between two it is a range
        (r"√\s*\(([^()]*)\)|√\s*(\w+)", r"\\sqrt{\1\2}"),
        (r"\\(?:left|right|(?:big|Big|bigg|Bigg)[lrm]?)(?![A-Za-z])\s*", ""),
        (r"\\math(?:open|close)\s*\{?\s*([][()])\s*\}?", r"\1"),
        (r"\\(?:displaystyle|textstyle|limits|!)(?![A-Za-z])|\\!", ""),
        (r"\\(?:quad|qquad|enspace|thinspace|space)(?![A-Za-z])|(?<!\\)(?:\\[,;:> ]|~)", " "),
        (r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\textcolor\s*\{\w+\}\s*\{([^{}]*)\}|\\color\s*\{\w+\}", r"\1"),
        (rf"\\(?:{STYLES})\s*\{{\s*(\d+)\s*\}}", r"\1"),
        (r"^\s*\\text\s*\{[^{}\d]*:\s*\}", ""),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:R|Reals|reals)(?![A-Za-z])|\\(?:Bbb|mathds)\s*\{?\s*R(?![A-Za-z])\s*\}?", r"\\mathbb{R}"),
        (r"\\(?:Z|integers)(?![A-Za-z])", r"\\mathbb{Z}"),
        (r"(?i)(?<=[(\[,])(\s*[-+]?\s*)(?:inf|infinity|oo)(?=\s*[)\],])", r"\1\\infty "),
        (r"(?i)^\s*(?:\\text\s*\{\s*)?all (?:real numbers|reals)\s*\}?\s*$", r"\\mathbb{R}"),
        (r"\\[Ss]et\s*(?=\{)", r"\\"),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\{\s*,\s*\}", ","),
        (r"(?:,\s*)?\\text\s*\{\s*,?\s*(?:and|or)\s*\}", ","),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree", "^\\\\circ"),
        (r"(?<=\d)i\b", " i"),  # else math-verify reads no imaginary unit
    )
)
INEQUALITY = re.compile(r"[<>]|\\(?:l|g|n)eq?(?![A-Za-z])|\\[lg]eqslant(?![A-Za-z])")
CONNECTIVE = re.compile(r"(?:,\s*)?(?:\\text\s*\{\s*,?\s*(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z]))")
"""The words "and" and "or" between two conditions."""
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w.^])")
WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))


def tidy(text: str) -> str:
    """Return an answer without wrappers, sizes, colours and closing punctuation, with symbols as LaTeX and digits as ASCII."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match.group().translate(SUPERSCRIPTS)}}}", text)
    text = "".join(map(_character, text))
    if INEQUALITY.search(text):
        text = CONNECTIVE.sub(lambda match: "\\lor " if match[match.lastindex or 0] == "or" else "\\land ", text)
    for pattern, replacement in PASSES:
        text = pattern.sub(replacement, text)
    text = GROUPED.sub(lambda match: match.group().replace(" ", ""), text)
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return _unwrap(" ".join(text.split()))


def plain(text: str) -> str:
    """Return an answer's words in lower case, without styles and quotation marks."""
    while (opened := STYLED.sub(r"\1", text)) != text:
        text = opened
    text = re.sub(r"[\"`“”„]|''|\$", "", text)
    return " ".join(text.split()).strip(" .,;:!()").casefold()


def _character(character: str) -> str:
    if character in COMMANDS:
        return COMMANDS[character]
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.category(character) == "No" and "\N{FRACTION SLASH}" in (parts := unicodedata.normalize("NFKC", character)):
        return " \\frac{{{}}}{{{}}}".format(*parts.split("\N{FRACTION SLASH}"))
    return character


def _unwrap(text: str) -> str:
    while True:
        stripped = text.strip().rstrip(".,;:").strip()
        for opening, closing in WRAPPERS:
            if stripped.startswith(opening) and stripped.endswith(closing) and len(stripped) > len(opening + closing):
                stripped = stripped[len(opening) : -len(closing)]
        stripped = stripped.removesuffix("\\\\").removesuffix("\\")
        if match := re.fullmatch(rf"\\(?:{STYLES})\s*\{{\s*([-+]?[\d.,/ ]*\d[^{{}}]*)\}}", stripped):
            stripped = match.group(1)  # a number in a style; words keep theirs, which tells them from a product of letters
        if stripped == text:
            return text
        text = stripped
