"""Test that a problem is said in the language of the reader, with the labels of forms."""

from rooms.console.formatting import read_translations
from rooms.console.problem_texts import translate

GERMAN = read_translations()["de"].gettext


def test_titles_and_frequent_texts_are_translated() -> None:
    problem = {"title": "Conflict with the present state", "detail": "there is a room of this name"}
    assert translate(problem, GERMAN) == {
        "title": "Widerspruch zum jetzigen Zustand",
        "detail": "es gibt schon einen Raum dieses Namens",
        "errors": [],
    }


def test_fields_have_the_labels_of_forms_and_other_texts_stay() -> None:
    errors = [
        {"field": "push_url", "message": "is missing"},
        {"field": "event_types[0].name", "message": "some other text"},
    ]
    found = translate({"title": "", "detail": "", "errors": errors}, GERMAN)
    assert found["errors"] == [
        {"field": "push_url", "label": "Webhook", "message": "fehlt"},
        {"field": "event_types[0].name", "label": None, "message": "some other text"},
    ]
    assert (found["title"], found["detail"]) == ("", "")
