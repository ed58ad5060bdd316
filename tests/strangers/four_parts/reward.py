def letters(completion):
    return sum(character.isalpha() for character in completion)
