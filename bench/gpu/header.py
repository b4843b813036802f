"""Reads kernels/taper_gpu.h, the C interface of the kernels, for ctypes. What it does not understand of it is an error.

    python3 header.py | cc -std=c11 -fsyntax-only -x c -        # whether a C compiler understands it alike
"""
import ctypes as C
import pathlib
import re

PATH = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "taper_gpu.h"
TYPES = {"int": C.c_int, "int32_t": C.c_int32, "uint32_t": C.c_uint32, "int64_t": C.c_int64, "uint64_t": C.c_uint64,
         "uint16_t": C.c_uint16, "float": C.c_float, "double": C.c_double, "void": None}
# Lines around the declarations.
FRAME = re.compile(r"""^(?: \#(?:ifndef|define)\ TAPER_GPU_H | \#include\ <stdint\.h> | \#endif
    | \#ifdef\ __cplusplus\n (?:extern\ "C"\ {|}) \n\#endif )$""", re.M | re.X)
DECLARATION = re.compile(r"""\s* (?:
      typedef\ struct\ \w+\*\ (?P<address>\w+);
    | typedef\ struct\ (?P<structure>\w+)\ { (?P<fields>[^{}]*) }\ (?P=structure);
    | enum\ { (?P<constants>[^{}]*) };
    | static\ inline\ [^{}]* { [^{}]* }                             # For C alone.
    | (?P<type>\w+)\ (?P<function>\w+)\((?P<arguments>[^()]*)\);
    ) \s*""", re.X)
FIELDS = re.compile(r"(?:const )?(?P<type>\w+)(?: (?P<names>\w+(?:\[\d+\])?(?:, \w+(?:\[\d+\])?)*)|\* (?P<address>\w+))")
ARGUMENT = re.compile(r"(?:const )?(?P<type>\w+)(?P<address>\*?) \w+")
CONSTANT = re.compile(r"(?P<name>\w+)(?: = (?P<value>\d+))?")


def read(text, base=C.Structure):
    """Structures, of class `base`, and constants by their names, and of each function the result and the arguments."""
    types, structures, constants, functions = dict(TYPES), {}, {}, {}

    def understood(match, line):
        """The groups of a match, whose type is known if it has one."""
        if not match or (match.groupdict().get("type") or "int") not in types:
            raise ValueError(f"taper_gpu.h: not understood: {line}")
        return match.groupdict()

    def parts(pattern, of, between):
        parts = " ".join(of.split()).strip(between + " ").split(between)
        return (understood(pattern.fullmatch(part.strip()), part) for part in parts)

    def fields(of):
        for part in parts(FIELDS, of, ";"):
            if part["address"]:
                yield part["address"], C.c_void_p
                continue
            for name in part["names"].split(", "):
                name, _, count = name.rstrip("]").partition("[")
                yield name, types[part["type"]] * int(count) if count else types[part["type"]]

    text = re.sub(" *//.*", "", text)
    text = FRAME.sub("", text).strip()
    while text:
        match = DECLARATION.match(text)
        one = understood(match, text.split("\n")[0])
        text = text[match.end():]
        if one["address"]:
            types[one["address"]] = C.c_void_p
        elif one["structure"]:
            made = type(one["structure"], (base,), {"_fields_": list(fields(one["fields"]))})
            structures[made.__name__] = types[made.__name__] = made
        elif one["constants"]:
            value = -1
            for part in parts(CONSTANT, one["constants"], ","):
                value = int(part["value"] or value + 1)
                constants[part["name"]] = value
        elif one["function"]:
            arguments = parts(ARGUMENT, one["arguments"], ",")
            functions[one["function"]] = types[one["type"]], [
                C.POINTER(types[part["type"]]) if part["address"] else types[part["type"]] for part in arguments]
    return structures, constants, functions


def main():
    structures, constants, _ = read(PATH.read_text())
    print(f'#include <stddef.h>\n#include "{PATH}"')
    claims = [f"{name} == {value}" for name, value in constants.items()]
    for name, of in structures.items():
        claims.append(f"sizeof({name}) == {C.sizeof(of)}")
        for field, _ in of._fields_:
            claims.append(f"offsetof({name}, {field}) == {getattr(of, field).offset}")
            claims.append(f"sizeof((({name}*)0)->{field}) == {getattr(of, field).size}")
    print(*(f'_Static_assert({claim}, "{claim}");' for claim in claims), sep="\n")


if __name__ == "__main__":
    main()
