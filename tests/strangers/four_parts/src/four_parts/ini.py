"""The data source "ini": each section of an INI file is a row."""

from configparser import ConfigParser, Error

from rlcore.spi import DataError


def read(request):
    """Return the rows, whose fields are text."""
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(request.path, encoding="utf-8")
    except (Error, UnicodeDecodeError) as error:
        raise DataError(f"{request.key}.path: {request.path} is no INI file: {error}") from error
    rows = [dict(parser[section]) for section in parser.sections()][: request.limit]
    for row, section in zip(rows, parser.sections(), strict=False):
        request.check(row, f"{request.path}, section [{section}]")
    return rows
