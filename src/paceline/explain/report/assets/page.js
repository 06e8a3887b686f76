// Draws the report from the document in this file. A panel is a function of its part of the
// document, so whatever has such a document can show the same panels. Text goes in as text only.

// The page: what was recorded, section by section, and in the end what was not. A section has a
// name, a panel, a title, what is to be known of it, and what is said where there is nothing to show.
const SECTIONS = [
  [
    "learning",
    Learning,
    "How it learned",
    "Every curve counts each sample once, whichever worker had it. " +
      "Samples per second are those of all workers, by the time that passed.",
    "nothing was recorded step by step, so there are no curves.",
  ],
  [
    "pipeline",
    Pipeline,
    "One batch, step by step",
    "Data parallelism: every worker has a copy of the model, computes on its part of the batch, " +
      "and all copies get the same update.",
    html`no batch was recorded; <code>paceline run --trace-step 12</code> does that.`,
  ],
  [
    "workers",
    Workers,
    "Who worked, who waited",
    "All workers finish a step together, so each step takes as long as the slowest one.",
    "none has finished a step.",
  ],
  [
    "generations",
    Generations,
    "Who died, who joined",
    "A worker that dies is replaced, and the others continue with the step they were in.",
    "",
  ],
  [
    "timeline",
    Timeline,
    "When it happened",
    "",
    html`when each worker did what was not recorded; <code>paceline run --timeline</code> does.`,
  ],
  [
    "scaling",
    Scaling,
    "What more workers bring",
    "",
    html`the job was not measured on several numbers of workers; <code>paceline scale</code> does.`,
  ],
  ["checkpoints", Checkpoints, "What was saved", "", "none was written."],
  ["details", Details, "Settings and messages", "", ""],
];

// A panel is drawn again when its data are others, and what one cannot draw leaves the others as
// they are.
class Safe extends preact.Component {
  componentDidCatch(error) {
    this.setState({ error, failed: this.props.data });
  }

  shouldComponentUpdate({ data }, { error }) {
    return data !== this.props.data || error !== this.state.error;
  }

  componentDidUpdate() {
    setStops();
  }

  render({ Panel, data }, { error, failed }) {
    return error && failed === data
      ? html`<p class="verdict bad">This cannot be drawn: ${error.message}</p>`
      : html`<${Panel} data=${data} />`;
  }
}

// Of its sections, the first `drawn` are.
function Page({ data, sections = SECTIONS, drawn = sections.length, Head = Overview, children }) {
  const shown = sections.filter(([name]) => data[name]),
    absent = sections.filter(([name, , , , why]) => !data[name] && why);
  useLayoutEffect(() => {
    setStops();
    root.dataset.ready = "true";
  }, []);
  return html`<header class="top">
      <div class="top-inner">
        <span class="brand">Paceline</span>
        <nav aria-label="Sections">
          <ul>
            ${["overview", ...shown.map((each) => each[0])].map(
              (name) => html`<li><a href=${"#" + name}>${sentence(name)}</a></li>`,
            )}
          </ul>
        </nav>
        <${Theme} />
      </div>
    </header>
    <main id="main">
      <${Safe} Panel=${Head} data=${data.overview || data} />
      ${shown.slice(0, drawn).map(
        ([name, Panel, title, lead]) =>
          html`<section key=${name} id=${name} aria-labelledby=${name + "-title"}>
            <h2 id=${name + "-title"}>${title instanceof Function ? title(data[name]) : title}</h2>
            ${lead && html`<p class="lead">${lead}</p>`}
            <${Safe} Panel=${Panel} data=${data[name]} />
          </section>`,
      )}
      ${
        absent.length > 0 &&
        html`<section id="absent" aria-labelledby="absent-title">
          <h2 id="absent-title">What was not recorded</h2>
          <ul>
            ${absent.map(([name, , , , why]) => html`<li><b>${sentence(name)}</b>: ${why}</li>`)}
          </ul>
        </section>`
      }
    </main>
    <footer>
      <p>${children}</p>
    </footer>`;
}

function Report({ data }) {
  return html`<${Page} data=${data}>
    Made by paceline ${data.version} on ${moment(data.made)} from ${data.folder}. This file is
    complete: it needs no network and sends nothing.
  <//>`;
}

// A page without a document in it is drawn by whoever gets one.
const inside = document.getElementById("data");
if (inside)
  render(
    html`<${Report} data=${JSON.parse(inside.textContent)} />`,
    document.getElementById("page"),
  );
