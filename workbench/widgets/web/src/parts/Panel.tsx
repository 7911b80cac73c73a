import { useId, type ReactNode } from "react";

interface Props {
  title: string;
  name: string;
  beside?: ReactNode; // at the right end of the title
  children: ReactNode;
}

// A part of the view with its title.
export function Panel({ title, name, beside, children }: Props): ReactNode {
  const id = useId();
  return (
    <section className={`wb-panel wb-${name}`} aria-labelledby={id}>
      <header className="wb-panel-head">
        <h3 id={id}>{title}</h3>
        {beside}
      </header>
      {children}
    </section>
  );
}
