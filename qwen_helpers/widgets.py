"""Sliders over pictures: a plain function of the knobs' values, redrawn at each move, with a still for readers.

Only what ipywidgets 7.7 and 8 share is used, and no Output widget (they can hang a run).
"""
import gc
import html

import ipywidgets as W
from IPython.display import display


# Text and handles that can be seen, and caught, on a projector.
LARGE = """<style>.demo {--jp-widgets-font-size: 17px; --jp-widgets-inline-height: 34px;
--jp-widgets-slider-handle-size: 22px; --jp-widgets-slider-handle-background-color: #1976D2;
--jp-widgets-slider-track-thickness: 6px;}
.demo .widget-readout {width: auto; max-width: none; min-width: 4em;}
.demo-picture.busy {opacity: 0.4; transition: opacity 0.2s 0.4s;}</style>"""


class Demo(W.VBox):
    """Knobs above a picture. Its saved output also carries the first picture, for viewers without a kernel.

    `live` says in one sentence what moves where there is a kernel; a static page writes it under the still.
    """

    def __init__(self, children, still, live):
        super().__init__([W.HTML(LARGE, layout=W.Layout(display="none")), *children])
        self.add_class("demo")
        self.still, self.live = still, live

    _ipython_display_ = None                # of ipywidgets 7, which would leave the still out

    def _repr_mimebundle_(self, **_):
        still, more = self.still._repr_mimebundle_()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, **still}, {**more, "live": self.live}


def knob(name, choice):
    """A slider: (low, high, start) of ints or floats, or (low, high, start, step), or a list of options."""
    style = dict(description=name.replace("_", " "), continuous_update=True,
                 style={"description_width": "initial"}, layout=W.Layout(width="95%", max_width="640px"))
    if isinstance(choice, list):
        return W.SelectionSlider(options=choice, **style)
    low, high, start, *step = choice
    if all(isinstance(x, int) for x in choice):
        return W.IntSlider(start, low, high, *step, **style)
    return W.FloatSlider(start, min=low, max=high, step=step[0] if step else (high - low) / 50, **style)


def demo(picture, play=False, **knobs):
    """Show `picture(**values)` under one slider a knob; `play` adds a Play button to the first knob.

    `picture` returns a Picture. A knob is (low, high, start), with a step as a fourth if wanted, or a list of
    options. An error in `picture` is written under the sliders instead of vanishing.
    """
    sliders = {name: knob(name, choice) for name, choice in knobs.items()}
    still = picture(**{name: slider.value for name, slider in sliders.items()})
    gc.unfreeze()           # Figures are full of cycles. Collecting them would go through all of torch each time, a
    gc.collect()            # third of a second in the middle of a move: what exists by now is left out of that.
    gc.freeze()
    image = W.Image(value=still.png(quick=True), layout=W.Layout(width="100%", max_width="760px"))
    trouble = W.HTML()
    for name, slider in sliders.items():
        slider.add_class(f"knob-{name}")
    image.add_class("demo-picture")
    trouble.add_class("demo-trouble")

    def redraw(_):
        image.add_class("busy")                     # one that takes its time grows pale
        try:
            image.value = picture(**{name: slider.value for name, slider in sliders.items()}).png(quick=True)
            trouble.value = ""
        except Exception as error:
            trouble.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"
        image.remove_class("busy")

    for slider in sliders.values():
        slider.observe(redraw, "value")
    rows = list(sliders.values())
    if play:
        button = W.Play(min=rows[0].min, max=rows[0].max, value=rows[0].value, interval=900)
        W.jslink((button, "value"), (rows[0], "value"))
        rows.insert(0, button)
    names = ", ".join(slider.description for slider in sliders.values())
    return Demo([*rows, image, trouble], still, f"A still. In the notebook a slider moves it: {names}.")


def live(pictures):
    """Show Pictures in one place while they are made, each in place of the one before; the last one stays."""
    place = None
    for picture in pictures:
        if place:
            place.update(picture)
        else:
            place = display(picture, display_id=True)


class Transcript(list):
    """Messages of a chat, shown as a white card."""

    def html(self, *more):
        style = "white-space:pre-wrap; background:white; color:black; border:1px solid #888; padding:0 12px"
        lines = (f"<p><b>{m['role']}</b>  {html.escape(m['content'])}</p>" for m in [*self, *more])
        return f'<div style="{style}">{"".join(lines) or "<p>…</p>"}</div>'

    def _repr_mimebundle_(self, **_):
        return {"text/html": self.html(), "text/plain": "\n".join(f"{m['role']}: {m['content']}" for m in self)}, {}


def chat_box(chat, *questions, **how):
    """A transcript that grows while `chat.stream(messages, **how)` runs, over a line to type into; errors show in it.

    `questions` are asked at once: they are the still.
    """
    said, line = Transcript(), W.Text(placeholder="Ask something, then press Enter", layout=W.Layout(width="60%"))
    page = W.HTML(said.html())
    send, new = W.Button(description="Send"), W.Button(description="New chat")

    def ask(question):
        if not question.strip():
            return
        line.value, user, answer = "", {"role": "user", "content": question}, {"role": "assistant", "content": ""}
        try:
            page.value = said.html(user)
            for text in chat.stream([*said, user], **how):
                page.value = said.html(user, answer := {"role": "assistant", "content": text})
            said.extend([user, answer])
            page.value = said.html()
        except Exception as error:
            page.value = said.html(user, {"role": "error", "content": f"{type(error).__name__}: {error}"})

    line.on_msg(lambda _, message, __: ask(line.value) if message.get("event") == "submit" else None)
    send.on_click(lambda _: ask(line.value))
    new.on_click(lambda _: (said.clear(), setattr(page, "value", said.html())))
    for name, part in dict(page=page, line=line, send=send, new=new).items():
        part.add_class(f"chat-{name}")
    for question in questions:
        ask(question)
    return Demo([page, W.HBox([line, send, new])], said, "A still. In the notebook you ask your own question here.")
