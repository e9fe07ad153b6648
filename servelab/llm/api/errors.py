"""Errors in the form of the OpenAI API."""


class APIError(Exception):
    """What a client gets instead of an answer.

    Parameters
    ----------
    status : int
        The HTTP status. Below 500 the request is at fault, otherwise the server.
    message : str
        What is wrong.
    param : str, optional
        The field at fault.
    code : str, optional
        The kind of fault, for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        """The JSON object that is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str, code: str = "invalid_value") -> APIError:
    """A field with a value that cannot be used."""
    return APIError(400, message, param, code)
