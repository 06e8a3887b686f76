// Draws the lessons from the document in this file: input fields, cards, recorded steps. Answers are
// compared as values. Text is inserted as text only, never as markup.

const LETTERS = "abcdefghijkl";
const UNITS = { kb: 1e3, mb: 1e6 };
const PLAIN_UNITS =
  /^(x|times|%|percent|b|ms|milliseconds|(byte|row|worker|device|line|step|file|epoch|tensor)s?|process(es)?|cop(y|ies)|)$/;
const ROUNDING = 0.015;

// The typed answer as a value; null if it cannot be parsed.
function readNumber(text) {
  const plain = text
    .replace(/(^|[^0-9])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])/g, (all) => all.replaceAll(",", ""))
    .replace(/^([+-]?[0-9]+),([0-9]+)/, "$1.$2");
  const number = "[+-]?(?:[0-9]+\\.?[0-9]*|\\.[0-9]+)(?:e[+-]?[0-9]{1,3})?";
  const found = plain.match(new RegExp(`^(${number})\\s*(?:/\\s*(${number}))?\\s*([a-z%]*)$`));
  if (!found || !(found[3] in UNITS || PLAIN_UNITS.test(found[3]))) return null;
  const value = (Number(found[1]) / Number(found[2] || 1)) * (UNITS[found[3]] || 1);
  return Number.isFinite(value) ? value : null;
}

function withoutBrackets(text) {
  while (text.length > 1 && ["()", "[]", "{}"].includes(text[0] + text[text.length - 1]))
    text = text.slice(1, -1).trim();
  return text;
}

function readShape(text) {
  let inner = withoutBrackets(text.replace(/^(torch\.)?size/, "").trim());
  if (/[0-9]\s*x\s*[0-9]/.test(inner)) inner = inner.replaceAll(",", "");
  return /^[0-9,x;\s]*$/.test(inner) ? (inner.match(/[0-9]+/g) || []).map(Number) : null;
}

function readOrder(text, choices) {
  const letters = text.replace(/[^a-z]/g, ""),
    isAll = [...letters].sort().join("") === LETTERS.slice(0, choices.length);
  return isAll ? [...letters].map((letter) => choices[LETTERS.indexOf(letter)]) : null;
}

function readValue({ kind, choices }, text) {
  const typed = text.trim().toLowerCase().replaceAll("−", "-").replaceAll("×", "x");
  if (!typed || typed.length > 300) return null;
  if (kind === "choice") return text;
  if (kind === "order") return readOrder(typed, choices);
  if (kind === "shape") return readShape(typed);
  if (kind === "number") return readNumber(typed);
  const parts = withoutBrackets(typed)
    .split(/[\s,;+&]+|and/)
    .filter(Boolean)
    .map(readNumber);
  return parts.length && !parts.includes(null) ? parts : null;
}

function isNear(typed, answer, tolerance) {
  if (Number.isInteger(answer) && !tolerance) return typed === answer;
  return Math.abs(typed - answer) <= Math.max(tolerance, ROUNDING) * Math.abs(answer);
}

function isSame({ kind, answer, tolerance, unit }, typed) {
  if (kind === "number") {
    const isShare = unit === "%" && Math.abs(answer) > 1;
    return (isShare ? [typed, 100 * typed] : [typed]).some(
      (each) => isNear(each, answer, tolerance) || (isShare && each === Math.round(answer)),
    );
  }
  if (kind === "choice") return typed === answer;
  const near = (value, i) =>
    kind === "numbers" ? isNear(value, answer[i], tolerance) : value === answer[i];
  return typed.length === answer.length && typed.every(near);
}

// The stage of a recorded step that shows an answer.
function RecordedStage({ data, place: [name, stageName], mark }) {
  const trace = data.traces[name],
    number = trace.stages.findIndex((stage) => stage.name === stageName),
    stage = trace.stages[number];
  if (!stage) return null;
  const mostRows = Math.max(1, trace.batch_rows);
  return html`<div class="stage now recorded">
    <div class="stage-picture">
      <${Boxes} ...${{ trace, stage, mostRows, mark }} row=${rowsOf(trace)[number]} />
    </div>
    <${StageWords} ...${{ trace, stage }} number=${number + 1} />
  </div>`;
}

// Lines of a table keep their columns; sentences are wrapped.
function isTabular(line) {
  return !line.trim() || /\S {2,}\S|^ /.test(line);
}

function Evidence({ data, question }) {
  const { why, evidence, code, stage, mark } = question;
  return html`<div class="found">
    <p>${why}</p>
    ${stage && html`<${RecordedStage} ...${{ data, mark }} place=${stage} />`}
    ${
      evidence.length > 0 &&
      html`<div class="printed" tabindex="0" role="region" aria-label="Output">
        ${evidence.map((line) => html`<p class=${isTabular(line) ? "tabular" : ""}>${line}</p>`)}
      </div>`
    }
    <details>
      <summary>The code that computed it</summary>
      <pre class="printed" tabindex="0" role="region" aria-label="Code">${code}</pre>
    </details>
  </div>`;
}

function Choices({ question, id, typed, setTyped }) {
  return html`<fieldset>
    <legend>${question.question}</legend>
    ${question.choices.map(
      (choice) =>
        html`<label class="choice"
          ><input
            type="radio"
            name=${id}
            value=${choice}
            checked=${typed === choice}
            onChange=${() => setTyped(choice)}
          />
          ${choice}</label
        >`,
    )}
  </fieldset>`;
}

function Field({ question, id, typed, setTyped }) {
  return html`<label for=${id} class="asked">${question.question}</label>
    ${
      question.kind === "order" &&
      html`<ol class="letters">
        ${question.choices.map((choice) => html`<li>${choice}</li>`)}
      </ol>`
    }
    <input
      id=${id}
      class="typed"
      value=${typed}
      autocomplete="off"
      spellcheck=${false}
      aria-describedby=${id + "-form"}
      onInput=${(event) => setTyped(event.target.value)}
    />
    <span id=${id + "-form"} class="form">${sentence(question.form)}</span>`;
}

// Predict, then compare. An answer that cannot be parsed is asked for again, and never counted.
function Question({ data, question, note, place = "" }) {
  const [typed, setTyped] = useState(""),
    [verdict, setVerdict] = useState(null),
    [trouble, setTrouble] = useState("");
  const Entry = question.kind === "choice" ? Choices : Field;
  const check = (event) => {
    event.preventDefault();
    const value = readValue(question, typed);
    if (value === null) {
      setTrouble("That is not an answer to this question. It should be " + question.form + ".");
      return;
    }
    setTrouble("");
    const isRight = isSame(question, value);
    setVerdict(!question.is_sure ? "unsure" : isRight ? "right" : "wrong");
    if (verdict === null) note(question.name, isRight, typed);
  };
  const show = () => {
    setTrouble("");
    setVerdict(verdict || "shown");
    if (verdict === null) note(question.name, false, "");
  };
  const looks = { right: "good", wrong: "bad", shown: "", unsure: "" };
  const said = {
    right: ["✓", (question.tolerance ? "Close enough: " : "Right: ") + question.shown],
    wrong: ["✗", "Not quite. The answer is " + question.shown],
    shown: ["", "The answer is " + question.shown],
    unsure: ["", "Measured: " + question.shown + ". Not counted: the machine was busy."],
  }[verdict || "shown"];
  return html`<form
    class=${"question" + (question.breaks ? " breaks" : "")}
    id=${place + "q-" + question.name}
    onSubmit=${check}
    noValidate
  >
    <${Entry} ...${{ question, typed, setTyped }} id=${place + "field-" + question.name} />
    <div class="controls">
      <button type="submit" class="check">Compare</button>
      <button type="button" class="show" onClick=${show}>Show the answer</button>
    </div>
    <div role="status">
      ${trouble && html`<p class="trouble">${trouble}</p>`}
      ${
        verdict &&
        html`<div class=${"verdict " + looks[verdict]}>
          <p>
            ${said[0] && html`<span class="sign" aria-hidden="true">${said[0]} </span>`}<strong
              >${said[1]}</strong
            >
          </p>
        </div>`
      }
    </div>
    ${verdict && html`<${Evidence} ...${{ data, question }} />`}
  </form>`;
}

// In one's own words, then the points of a good answer to tick off.
function Explain({ question, points }) {
  const [isOpen, setOpen] = useState(false),
    [ticked, setTicked] = useState([]);
  const toggle = (i) =>
    setTicked(ticked.includes(i) ? ticked.filter((each) => each !== i) : [...ticked, i]);
  return html`<div class="explain">
    <h3>In your own words: ${question}</h3>
    <button type="button" class="points" onClick=${() => setOpen(true)} disabled=${isOpen}>
      I have said it: show the points
    </button>
    ${
      isOpen &&
      html`<ul>
          ${points.map(
            (point, i) =>
              html`<li>
                <label
                  ><input
                    type="checkbox"
                    checked=${ticked.includes(i)}
                    onChange=${() => toggle(i)}
                  />
                  ${point}</label
                >
              </li>`,
          )}
        </ul>
        <p role="status">${ticked.length} of ${count(points.length, "point")}</p>`
    }
  </div>`;
}

// One question at a time, and in the end what to explain; #q-NAME in the address leads to one.
function LessonPanel({ data, lesson, number, note }) {
  const [now, setNow] = useState(0),
    count = lesson.questions.length + 1;
  useLayoutEffect(() => {
    const follow = () => {
      const found = lesson.questions.findIndex((each) => location.hash === "#q-" + each.name);
      if (found >= 0) setNow(found);
    };
    follow();
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const go = (index) => setNow((index + count) % count);
  const place = now < count - 1 ? `Question ${now + 1} of ${count - 1}` : "In your own words";
  return html`<section id=${lesson.name} aria-labelledby=${lesson.name + "-title"}>
    <h2 id=${lesson.name + "-title"}><span class="ordinal">${number}</span>${lesson.title}</h2>
    <p class="lead">${lesson.introduction}</p>
    <div class="controls">
      <${Steps} names=${["Previous question", "Next question"]} ...${{ place, now, go }} />
    </div>
    ${lesson.questions.map(
      (question, i) =>
        html`<div hidden=${i !== now}><${Question} ...${{ data, question, note }} /></div>`,
    )}
    <div hidden=${now !== count - 1}>
      ${lesson.explain.map((each) => html`<${Explain} ...${each} />`)}
    </div>
  </section>`;
}

// One card at a time; space or Enter turns it, arrow keys change it.
function Cards({ data, cards }) {
  const [now, setNow] = useState(0),
    [isTurned, setTurned] = useState(false);
  const question = cards[now],
    place = `Card ${now + 1} of ${cards.length}`;
  const go = (index) => {
    setNow((index + cards.length) % cards.length);
    setTurned(false);
  };
  const onKey = (event) => {
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: cards.length - 1 };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("pre")) return;
    event.preventDefault();
    go(moves[event.key]);
  };
  return html`<section id="cards" aria-labelledby="cards-title" onKeyDown=${onKey}>
    <h2 id="cards-title">Cards</h2>
    <p class="lead">Say the answer, then turn the card. Arrow keys go to the next and the previous one.</p>
    <div class="controls">
      <${Steps} names=${["Previous card", "Next card"]} ...${{ place, now, go }} />
    </div>
    <button
      type="button"
      class="card"
      aria-expanded=${String(isTurned)}
      onClick=${() => setTurned(!isTurned)}
    >
      <span class="card-front">${question.question}</span>
      ${
        question.choices.length > 0 &&
        html`<span class="card-choices">${question.choices.join(" · ")}</span>`
      }
      <strong class="card-back">${isTurned ? question.shown : "Turn it over"}</strong>
    </button>
    ${isTurned && html`<${Evidence} ...${{ data, question }} />`}
  </section>`;
}

// One of the five problems: some of the questions above, to be answered again.
function Problem({ data, number, title, asked }) {
  const [results, setResults] = useState({});
  const note = (name, isRight) => setResults((before) => ({ ...before, [name]: isRight }));
  const done = Object.values(results);
  const state = done.length < asked.length ? done.length + " of " + asked.length : "";
  return html`<details class="problem">
    <summary>
      <h3><span class="ordinal">${number}</span>${title}</h3>
      <span class="standing" role="status"
        >${state ? state + " answered" : done.every(Boolean) ? "✓ solved" : "not solved"}</span
      >
    </summary>
    ${asked.map(
      (question) => html`<${Question} ...${{ data, question, note }} place="problem-" />`,
    )}
  </details>`;
}

function Problems({ data, questions }) {
  return html`<section id="challenge" aria-labelledby="challenge-title">
    <h2 id="challenge-title">Five problems</h2>
    <p class="lead">Open one and answer all its questions; it is solved if all are right.</p>
    ${data.problems.map((problem, i) => {
      const asked = problem.questions.map((name) => questions.find((each) => each.name === name));
      return html`<${Problem} ...${{ data, asked }} title=${problem.title} number=${i + 1} />`;
    })}
  </section>`;
}

function curveOf(label, look, epochs, key) {
  const known = epochs.filter((epoch) => isNumber(epoch[key]));
  const values = known.map((epoch) => epoch[key]);
  const columns = [known.map((epoch) => epoch.epoch), values, values, values];
  return known.length ? [{ label, look, dots: true, columns }] : [];
}

function LearningPanel({ epochs }) {
  const charts = [
    ["Loss", "loss", "evaluation_loss", figure],
    ["Accuracy", "accuracy", "evaluation_accuracy", percent],
  ];
  return html`<div class="charts">
    ${charts.map(([title, own, unseen, say]) => {
      const curves = [
        ...curveOf("training", "train", epochs, own),
        ...curveOf("unseen rows", "test", epochs, unseen),
      ];
      const values = curves.length ? curves[0].columns[1] : [];
      const said = "From " + say(values[0]) + " to " + say(values[values.length - 1]) + ".";
      return (
        curves.length > 0 &&
        html`<${Chart} ...${{ title, curves, say, said }} xLabel="epoch" zero=${true} />`
      );
    })}
  </div>`;
}

function PipelinePanel({ data }) {
  const trace = data.traces.pipeline;
  return html`<section id="pipeline" aria-labelledby="pipeline-title">
    <h2 id="pipeline-title">One batch, stage by stage</h2>
    <p class="lead">${aboutOf(trace)}</p>
    <${Recording} trace=${trace}>
      ${trace.training && html`<${LearningPanel} epochs=${trace.training.epochs} />`}
    <//>
  </section>`;
}

// An element with its contents, from plain data: text stays text.
function drawn([name, attributes, text, inside]) {
  return h(name, attributes, text, inside.map(drawn));
}

// The reader's answers beside the results, wrong ones first.
function Review({ questions, results }) {
  const told = questions.filter((question) => question.name in results);
  told.sort((a, b) => results[a.name].isRight - results[b.name].isRight);
  const rows = told.map(({ name, question, shown }) => [
    html`<a href=${"#q-" + name}>${question}</a>`,
    (results[name].isRight ? "✓ " : "") + results[name].typed,
    shown,
  ]);
  const head = ["Question", "You", "Found"];
  return html`<section id="review" aria-labelledby="review-title">
    <h2 id="review-title">Your answers and the results</h2>
    ${
      rows.length > 0
        ? html`<${Table} caption="Your predictions" ...${{ head, rows }} words=${[0, 1, 2]} />`
        : html`<p class="lead">Every question that you answer appears here.</p>`
    }
  </section>`;
}

function LessonsPage({ data }) {
  const [results, setResults] = useState({});
  const note = (name, isRight, typed) =>
    setResults((before) => ({ ...before, [name]: { isRight, typed } }));
  const questions = data.lessons.flatMap((lesson) => lesson.questions),
    done = questions.filter((each) => each.is_sure && each.name in results);
  const links = [
    ...data.lessons.map(({ name, title }) => [name, title]),
    ["challenge", "Five problems"],
    ["cards", "Cards"],
    ["pipeline", "One batch, stage by stage"],
    ["review", "Your answers and the results"],
  ];
  const right = done.filter((each) => results[each.name].isRight).length;
  const summary = html`<b>Lessons</b><span>${done.length} of ${questions.length} answered</span
    ><span>${right} right</span>`;
  const footer = html`Made by paceline ${data.version} on ${moment(data.made)}. This file is complete:
    it needs no network and sends nothing. Another seed, batch or number of workers makes other
    questions: <code>paceline learn --html FILE --seed 7 --workers 3</code>.`;
  return html`<${Frame} label="Lessons" ...${{ summary, links, footer }}>
      <section id="overview" aria-label="Overview">
        <h1>Data parallelism, by running it</h1>
        <div class="picture">${drawn(data.picture)}</div>
        <div class="story">
          <p>
            Predict what the engine does, compare it with what it did, then see it break. Nothing
            here was written down as the right answer: every one was found by running
            ${" " + data.model} with a batch of ${figure(data.batch)} rows on
            ${" " + count(data.workers, "worker")}, seed ${data.seed}, when this page was made.
          </p>
          ${data.trouble && html`<p class="trouble">${data.trouble}</p>`}
        </div>
        <p class="tally" role="status">
          ${done.length} of ${count(questions.length, "question")} answered,
          ${" " + right} right
        </p>
      </section>
      ${data.lessons.map(
        (lesson, i) => html`<${LessonPanel} ...${{ data, lesson, note }} number=${i + 1} />`,
      )}
      <${Problems} data=${data} questions=${questions} />
      <${Cards} data=${data} cards=${questions} />
      <${PipelinePanel} data=${data} />
      <${Review} ...${{ questions, results }} />
    <//>`;
}

render(
  html`<${LessonsPage} data=${JSON.parse(document.getElementById("data").textContent)} />`,
  document.getElementById("page"),
);
