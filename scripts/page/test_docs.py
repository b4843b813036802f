"""The API's reference at /docs."""

from conftest import KEY, shot


def test_the_api_is_explained(visit, address):
    page = visit(address + "/docs")
    page.get_by_text("/v1/chat/completions", exact=True).click()
    operation = page.locator(".operation[open]")
    field = operation.locator("dt", has=page.get_by_text("temperature", exact=True))
    field.wait_for()
    assert "number · 0 to 2 · default 1" in field.inner_text()
    assert "required" in operation.locator("dt", has=page.get_by_text("messages", exact=True)).inner_text()
    attention = operation.locator("dt", has=page.get_by_text("attention", exact=True)).first
    attention.locator("xpath=following-sibling::dd[1]").locator("summary").first.click()
    operation.get_by_text("question_tokens", exact=True).wait_for()
    shot(page, "docs")


def test_an_api_that_cannot_be_explained_says_why(visit, locked):
    page = visit(locked + "/docs", refusals=True)

    # Something before the server that wants the key for this, too; as the server judges keys.
    def guard(route):
        checked = route.fetch(url=locked + "/v1/models")
        route.continue_() if checked.ok else route.fulfill(response=checked)

    page.route("**/openapi.json", guard)
    page.reload()
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "status 401" in alert.inner_text() and "wants an API key" in alert.inner_text()
    shot(page, "docs-locked")
    alert.get_by_role("link").click()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.locator(".welcome").wait_for()
    page.get_by_role("link", name="API").click()
    page.get_by_text("/v1/chat/completions", exact=True).wait_for()
    assert page.get_by_role("alert").count() == 0
    page.unroute("**/openapi.json")
    page.route("**/openapi.json", lambda route: route.fulfill(status=404, body="<p>nothing</p>"))
    page.reload()
    alert.wait_for()
    assert "status 404" in alert.inner_text() and alert.get_by_role("link").count() == 0
