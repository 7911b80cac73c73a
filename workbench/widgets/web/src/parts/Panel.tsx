import { useId, type KeyboardEvent, type ReactNode } from "react";

interface Props {
  title: string;
  name: string;
  beside?: ReactNode; // at the right end of the title
  onKeyDown?: (event: KeyboardEvent) => void;
  children: ReactNode;
}

// A part of the view with its title.
export function Panel({ title, name, beside, onKeyDown, children }: Props): ReactNode {
  const id = useId();
  return (
    <section className={`wb-panel wb-${name}`} aria-labelledby={id} onKeyDown={onKeyDown}>
      <header className="wb-panel-head">
        <h3 id={id}>{title}</h3>
        {beside}
      </header>
      {children}
    </section>
  );
}
