"""Finds the functions of a C++ file by matching braces: good enough for budgets, no compiler needed."""

import dataclasses
import re

# Comments, preprocessor lines, raw strings, strings and characters: none of them holds code.
BLANKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.DOTALL | re.MULTILINE)
SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")
# What may stand before a parenthesis without being the function's name.
NOT_A_NAME = {"decltype", "explicit", "noexcept", "alignas", "requires", "sizeof", "__attribute__"}
# A reference to an rvalue, `T&& x`, has no space before its `&&`.
BRANCH = re.compile(r"\b(?:if|for|while|case|catch)\b|\?|(?<=\s)&&(?=\s)|\|\|")
OPENING, CLOSING = "([{<", ")]}>"


@dataclasses.dataclass
class Function:
    name: str
    line: int  # where its head begins, from 1
    lines: int  # 0 for a declaration
    parameters: int
    branches: int  # ways through it: one, plus each if, for, while, case, catch, ?:, && and ||; 0 for a declaration


def blank(text):
    """The text with everything that is not code replaced by spaces; line breaks stay."""
    return BLANKED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def matching(text, start):
    """Index of the parenthesis that closes the one at start."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def parameter_list(head):
    """(name, text between the parentheses) of a function's head, or None when it is no function."""
    at = 0
    while (opening := head.find("(", at)) >= 0:
        closing = matching(head, opening)
        before = re.search(r"([\w~]+|operator\s*[^\w\s(]*)\s*$", head[:opening])
        name = before[1] if before else ""
        if name.startswith("operator") and head[opening + 1:closing].strip() == "":
            following = re.match(r"\s*\(", head[closing + 1:])
            if following:  # operator()(...)
                opening = closing + following.end()
                return "operator()", head[opening + 1:matching(head, opening)]
        if name and name not in NOT_A_NAME:
            return name, head[opening + 1:closing]
        at = closing + 1
    return None


def count_parameters(text):
    """How many commas stand outside all brackets, plus one."""
    text = re.sub(r"->|<=|>=|<<|>>(?=\s*\w)", " ", text)
    if text.strip() in ("", "void"):
        return 0
    depth, count = 0, 1
    for c in text:
        if c in OPENING:
            depth += 1
        elif c in CLOSING:
            depth -= 1
        elif c == "," and depth == 0:
            count += 1
    return count


def without_template(head):
    """The head without its leading `template <...>`, whose defaults and `class` words mean nothing here."""
    while opening := re.match(r"\s*(?:(?:public|private|protected):\s*)*template\s*<", head):
        depth, i = 1, opening.end()
        while i < len(head) and depth:
            depth += (head[i] == "<") - (head[i] == ">" and head[i - 1] != "-")
            i += 1
        head = head[i:]
    return head


def is_scope_head(head):
    """Does a brace after this open a namespace or class?"""
    bare = re.sub(r"(alignas\s*\([^()]*\)|\[\[[^\]]*\]\])", "", without_template(head))
    return not bare.strip() or bool(SCOPE.search(bare)) and "(" not in bare and "=" not in bare


def is_function_head(head):
    head = without_template(head)
    if is_scope_head(head):
        return False
    bare = re.sub(r"\([^()]*\)", "()", head)
    if re.search(r"(?<![=!<>])=(?!=)", re.sub(r"operator\s*[^\w\s(]+|=\s*(default|delete|0)\s*$", "", bare)) \
            and not re.search(r"\)[^=]*$", bare.split("=")[0]):
        return False  # an initialised variable
    scope = re.search(r"\b(namespace|class|struct|union|enum)\b", head)
    if scope and (scope.start() < head.find("(") or "(" not in head):
        # A function may return `struct x`; a class has no parameter list after its name.
        return bool(re.match(r"\s*(template\s*<[^{]*>\s*)?(enum|struct|class)\s+\w+[\s&*]+\w+\s*\(", head))
    return "(" in head and not re.match(r"\s*(static_assert|using|typedef|friend class)\b", head)


def functions(text):
    """Functions with a body and declarations, at namespace and class scope; lambdas count as their owner."""
    code = blank(text)
    found, scopes = [], []  # scopes: how deep we are in namespaces and classes
    head_start, i = 0, 0
    while i < len(code):
        c = code[i]
        if c == "{":
            head = code[head_start:i]
            if is_function_head(head):
                i = skip_body(code, i)
                add(found, text, code, head, head_start, i)
                head_start = i
                continue
            if is_scope_head(head):
                scopes.append(i)
                head_start = i + 1
            else:
                i = closing_brace(code, i)  # an initialiser: the head goes on behind it
        elif c == "}":
            if scopes:
                scopes.pop()
            head_start = i + 1
        elif c == ";":
            head = code[head_start:i]
            if is_function_head(head):
                add(found, text, code, head, head_start, None)
            head_start = i + 1
        i += 1
    return found


def closing_brace(code, start):
    """Index of the brace that closes the one at start."""
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] == "{") - (code[i] == "}")
        if depth == 0:
            return i
    return len(code) - 1


def skip_body(code, start):
    """Index after a function's body. Braces of a constructor's member initialisers come before it."""
    end = closing_brace(code, start) + 1
    while more := re.match(r"\s*(,[^;{}]*)?\{", code[end:]):
        end = closing_brace(code, end + more.end() - 1) + 1
    return end


def add(found, text, code, head, head_start, end):
    parsed = parameter_list(without_template(head))
    if parsed is None or (end is None and parsed[0].isupper()):  # a macro's use
        return
    access = re.match(r"(\s|public:|private:|protected:)*", head)
    first = text.count("\n", 0, head_start + access.end()) + 1
    lines = 0 if end is None else text.count("\n", 0, end) + 2 - first
    branches = 0 if end is None else 1 + len(BRANCH.findall(code, head_start, end))
    found.append(Function(parsed[0], first, lines, count_parameters(parsed[1]), branches))
