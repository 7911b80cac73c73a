import { useEffect, useRef, useState, type ReactNode } from "react";

import { useBench, useTrait } from "../hooks";
import { Panel } from "./Panel";
import { used } from "./used";

const PAUSE = 300; // ms without a key until what was typed is read
const TOKENS = /(#.*)|("[^"\n]*"?|'[^'\n]*'?)|\b(from|import|as|lambda|for|in|if|else|and|or|not|def|return)\b|\b(\d[\d_.]*)\b|(>>|[|+~=])/g;
const KINDS = ["comment", "string", "keyword", "number", "operator"];

// The code of the pipeline. What is typed moves the cards; what the cards do is written here.
export function Code(): ReactNode {
  const { talk } = useBench();
  const code = useTrait("code");
  const { together } = useTrait("wiring");
  const [draft, setDraft] = useState<string | null>(null); // what was typed, until Python's text is that
  const [typing, setTyping] = useState(false);
  const unread = useRef<string | null>(null); // typed and not sent yet
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);

  const read = (): void => {
    clearTimeout(timer.current);
    if (unread.current !== null) talk.newest("code", { do: "code", text: unread.current });
    unread.current = null;
  };
  useEffect(() => {
    if (!typing && unread.current === null && code.error === "") setDraft(null);
  }, [code]);
  useEffect(() => () => clearTimeout(timer.current), []);

  const text = draft ?? code.text.replace(/\n$/, "");
  const type = (typed: string): void => {
    setDraft(typed);
    unread.current = typed;
    clearTimeout(timer.current);
    timer.current = setTimeout(read, PAUSE);
  };
  const leave = (): void => {
    setTyping(false);
    if (unread.current !== null) read();
    else if (code.error === "") setDraft(null);
  };
  const lines = text.split("\n");
  return (
    <Panel title="Code" name="code" beside={<Copy text={text + used(text)} />}>
      <div className="wb-editor">
        <div className="wb-editor-lines" aria-hidden="true">
          {lines.map((_, index) => (
            <span key={index} className={index + 1 === code.line ? "wb-editor-wrong" : ""}>
              {index + 1}
            </span>
          ))}
        </div>
        <div className="wb-editor-text">
          <pre aria-hidden="true">
            {lines.map((line, index) => (
              <span key={index} className={index + 1 === code.line ? "wb-editor-line wb-editor-wrong" : "wb-editor-line"}>
                {coloured(line)}
                {"\n"}
              </span>
            ))}
          </pre>
          <textarea
            aria-label="Code of the pipeline"
            aria-invalid={code.error !== ""}
            spellCheck={false}
            autoCapitalize="off"
            autoComplete="off"
            wrap="off"
            value={text}
            onFocus={() => setTyping(true)}
            onBlur={leave}
            onChange={(event) => type(event.target.value)}
          />
        </div>
      </div>
      <p className="wb-note">
        {Object.entries(together)
          .filter(([word]) => new RegExp(`\\b${word}\\b`).test(text))
          .map(([word, ops]) => (
            <span key={word}>
              <code>{word}</code> is {ops.join(", ")}.{" "}
            </span>
          ))}
        In Python, <code>.pipeline</code>, <code>.scenario</code> and <code>.schedule</code> of this view are what stands here.
      </p>
      {code.error && (
        <p className="wb-wrong" role="alert">
          {code.line > 0 && <b>Line {code.line}. </b>}
          {code.error.replace(/^line \d+: /i, "")}
        </p>
      )}
    </Panel>
  );
}

function coloured(line: string): ReactNode[] {
  const parts: ReactNode[] = [];
  let end = 0;
  for (const match of line.matchAll(TOKENS)) {
    const kind = KINDS[match.slice(1).findIndex((group) => group !== undefined)];
    parts.push(line.slice(end, match.index));
    parts.push(
      <i key={match.index} className={`wb-code-${kind}`}>
        {match[0]}
      </i>,
    );
    end = match.index + match[0].length;
  }
  parts.push(line.slice(end));
  return parts;
}

function Copy({ text }: { text: string }): ReactNode {
  const { announce } = useBench();
  const [done, setDone] = useState(false);
  const copy = async (): Promise<void> => {
    if (!(await copied(text))) return announce("The browser does not allow copying here.");
    announce("The code is copied.");
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return (
    <button type="button" className="wb-button" onClick={() => void copy()}>
      {done ? "Copied" : "Copy"}
    </button>
  );
}

async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea"); // where the page has no right to the clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
